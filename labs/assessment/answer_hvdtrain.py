"""Our answer with hvdtrain: serial.py's network, batch, rate and schedule as a configuration, and
no communication by hand.

mpirun -np 2 python answer_hvdtrain.py --data FOLDER [--epochs 5]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from net import Net
from safetensors.torch import save_file

import hvdtrain

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--epochs", type=int, help="5; of a small data set 8")
options = parser.parse_args()

torch.manual_seed(1)
sets = {}
for part in ("train", "val"):
    with np.load(options.data / f"{part}.npz", allow_pickle=False) as arrays:
        # uint8 images: hvdtrain normalizes them by the same mean and deviation
        sets[part] = (
            arrays["x"],
            arrays["y"],
        )
x, y = sets["train"]
epochs = options.epochs or (5 if len(x) > 10_000 else 8)
config = {
    "epochs": epochs,
    "batch.size": 128,  # over all ranks
    "optim": {
        "base_lr": 0.1,
        "base_batch": 128,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
    },
    "recipe": {"warmup": "20%", "schedule": "linear"},
    "run": "run",
}
net = Net(channels=x.shape[1], classes=int(y.max()) + 1)
run = hvdtrain.train(config, model=net, train_data=sets["train"], val_data=sets["val"])
if run.rank == 0:
    save_file(net.state_dict(), "model.safetensors")

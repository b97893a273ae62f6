"""Trains the assessment's network in one process: the script that you convert (README.md).

python serial.py --data FOLDER [--epochs 5]     reads train.npz and val.npz there, and writes model.safetensors here
"""  # noqa: E501

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from net import Net
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128
LR = 0.1
MOMENTUM = 0.9
DECAY = 5e-4
SHOWN_STEPS = 50  # a line each so many: the grader ends a job that is silent


def read(path: Path) -> TensorDataset:
    """Images, uint8 (n, C, H, W), and the number of each one's class."""
    with np.load(path, allow_pickle=False) as arrays:
        return TensorDataset(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))


def read_stats(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std of each channel of the training images / 255, (C, 1, 1)."""
    with np.load(path, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays["mean"])[:, None, None], torch.from_numpy(arrays["std"])[
            :, None, None
        ]


def accuracy(net: Net, loader: DataLoader) -> float:
    net.eval()
    with torch.no_grad():
        right = sum(int((net(normalized(x)).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)


def normalized(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / 255 - mean) / std


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--epochs", type=int, help="5; of a small data set 8")
options = parser.parse_args()

torch.manual_seed(1)
train = read(options.data / "train.npz")
val = read(options.data / "val.npz")
mean, std = read_stats(options.data / "train.npz")
train_loader = DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True)
val_loader = DataLoader(val, batch_size=500)

epochs = options.epochs or (5 if len(train) > 10_000 else 8)
net = Net(channels=train.tensors[0].shape[1], classes=int(train.tensors[1].max()) + 1)
optimizer = torch.optim.SGD(
    net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True
)
steps = epochs * len(train_loader)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, 5 * (step + 1) / steps, 1.25 * (1 - step / steps))
)

start = time.perf_counter()
for epoch in range(epochs):
    net.train()
    for step, (x, y) in enumerate(train_loader, 1):
        optimizer.zero_grad()
        loss = cross_entropy(net(normalized(x)), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % SHOWN_STEPS == 0:
            print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"epoch {epoch + 1}  {seconds:.1f} s  loss {loss.item():.4f}  val accuracy "
        f"{accuracy(net, val_loader):.4f}",
        flush=True,
    )
save_file(net.state_dict(), "model.safetensors")

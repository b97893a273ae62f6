"""Our answer: serial.py with Horovod. Each line that differs has a comment that begins with its
number in README.md.

mpirun -np 2 python answer.py --data FOLDER [--epochs 5]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from net import Net
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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
    """Over the samples of all ranks, each counted once."""
    net.eval()
    for name, buffer in net.named_buffers():  # 7: the running statistics of all ranks
        if buffer.is_floating_point():
            hvd.allreduce_(buffer, name=name)
    with torch.no_grad():
        right = sum(int((net(normalized(x)).argmax(1) == y).sum()) for x, y in loader)
    # 6: sums, not means
    counts = hvd.allreduce(torch.tensor([right, len(loader.dataset)]), op=hvd.Sum, name="accuracy")
    return int(counts[0]) / int(counts[1])


def normalized(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / 255 - mean) / std


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--epochs", type=int, help="5; of a small data set 8")
options = parser.parse_args()

hvd.init()  # 1: before anything that asks for rank or size
torch.manual_seed(1)
train = read(options.data / "train.npz")
val = read(options.data / "val.npz")
mean, std = read_stats(options.data / "train.npz")
# 2: each rank its share of every epoch
sampler = DistributedSampler(train, hvd.size(), hvd.rank(), drop_last=True)
# 3: the same global batch and rate
train_loader = DataLoader(train, batch_size=BATCH // hvd.size(), sampler=sampler, drop_last=True)
# 6: each rank its share of the validation
mine = TensorDataset(*(tensor[hvd.rank() :: hvd.size()] for tensor in val.tensors))
val_loader = DataLoader(mine, batch_size=500)

epochs = options.epochs or (5 if len(train) > 10_000 else 8)
net = Net(channels=train.tensors[0].shape[1], classes=int(train.tensors[1].max()) + 1)
optimizer = torch.optim.SGD(
    net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True
)
# 4: the mean gradient of all ranks
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
hvd.broadcast_parameters(net.state_dict(), root_rank=0)  # 5: all ranks begin with the same weights
steps = epochs * len(train_loader)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, 5 * (step + 1) / steps, 1.25 * (1 - step / steps))
)

start = time.perf_counter()
for epoch in range(epochs):
    net.train()
    sampler.set_epoch(epoch)  # 2: another order in each epoch
    for step, (x, y) in enumerate(train_loader, 1):
        optimizer.zero_grad()
        loss = cross_entropy(net(normalized(x)), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % SHOWN_STEPS == 0 and hvd.rank() == 0:  # 8
            print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}", flush=True)
    seconds = time.perf_counter() - start
    shown = accuracy(net, val_loader)  # 6: on every rank
    if hvd.rank() == 0:  # 8: one rank prints and writes
        print(
            f"epoch {epoch + 1}  {seconds:.1f} s  loss {loss.item():.4f}  val accuracy {shown:.4f}",
            flush=True,
        )
if hvd.rank() == 0:
    save_file(net.state_dict(), "model.safetensors")

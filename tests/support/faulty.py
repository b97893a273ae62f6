"""A user's own model that fails on one rank at one step: model.name=faulty:Faulty."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from hvdtrain.comm.launcher_variables import placement


class Faulty(nn.Module):
    """A linear model; rank `bad_rank` raises (or with `leave` exits) in forward number `bad_step`,
    and writes into `stamp` when."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        bad_rank: int = -1,
        bad_step: int = 10,
        stamp: str = "",
        leave: bool = False,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.unused = nn.Linear(3, 3)
        self.bad_step = bad_step if placement(os.environ).rank == bad_rank else -1
        self.passes = 0
        self.stamp = stamp
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.bad_step:
            Path(self.stamp).write_text(str(time.time()))
            if self.leave:
                sys.exit(0)
            raise ArithmeticError(f"forward {self.passes} was made to fail")
        return self.fc(x.flatten(1))


def not_a_model(shape: tuple[int, int, int]) -> str:
    return "a string"


class Views(nn.Module):
    """A model as many people write it: x.view(x.size(0), -1) takes contiguous memory only, and no
    batch of none."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[2], 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3 * shape[0] * shape[1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        return self.fc(x.view(x.size(0), -1))


class Tied(nn.Module):
    """Two layers that share one weight, and a buffer that a state_dict leaves out."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        width = shape[0] * shape[1] * shape[2]
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.fc = nn.Linear(width, classes)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.two(self.one(x.flatten(1))) * self.scale)


class Late(nn.Module):
    """A linear model whose forward takes `ms` longer on rank 1, which also warns once."""

    def __init__(self, shape: tuple[int, int, int], classes: int, ms: float = 0.0) -> None:
        super().__init__()
        self.fc = nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.late_s = ms / 1e3 * (placement(os.environ).rank == 1)
        self.warned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.late_s:
            time.sleep(self.late_s)
            if not self.warned:
                warnings.warn("this rank is late", UserWarning, stacklevel=2)
                self.warned = True
        return self.fc(x.flatten(1))


class Staged(nn.Sequential):
    """Three linear units; the last one fails, or with `hang` stays, in training forward number
    `bad_step`."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, bad_step: int = 10, hang: bool = False
    ) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(shape[0] * shape[1] * shape[2], 16),
            Bad(classes, bad_step, hang),
        )


class Bad(nn.Linear):
    def __init__(self, classes: int, bad_step: int, hang: bool) -> None:
        super().__init__(16, classes)
        self.passes = 0
        self.bad_step = bad_step
        self.hang = hang

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == self.bad_step:
            if self.hang:
                time.sleep(1000)
            raise ArithmeticError(f"forward {self.passes} was made to fail")
        return super().forward(x)

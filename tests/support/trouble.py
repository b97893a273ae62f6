"""A user's own model that has one fault, once: model.name=trouble:Trouble model.fault=sleep
model.once=FILE."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from hvdtrain.comm.launcher_variables import placement

SLOW_S = 0.2  # a pass of an evaluation in trouble
for _method in vars(
    torch.optim.Optimizer
).values():  # saves each rank of each test the 1.2 s that import torch._dynamo takes
    if hasattr(_method, "__wrapped__"):
        # what torch itself would put there after that import
        _method.__wrapped__.__dynamo_disable = _method.__wrapped__


class Trouble(nn.Module):
    """Buffers, optimizer state, dropout. Rank `rank` does `fault` in training pass `at` of its
    process, unless the file `once` exists.

    `once` gets the time of the fault, so the same command continues without it. fault=build: while
    it is made; evaluate: slow evaluations.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        fault: str = "",
        rank: int = 1,
        at: int = 25,
        once: str = "",
        pass_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(shape[0] * shape[1] * shape[2], 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(16, classes),
        )
        self.passes = 0
        self.at = at
        self.once = Path(once)
        self.pass_s = pass_s
        self.fault = (
            fault
            if placement(os.environ).rank == rank and not (once and self.once.exists())
            else ""
        )
        if self.fault == "build":
            self.begin()
            time.sleep(1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            time.sleep(self.pass_s)
            x = self.do(x) if self.fault and self.passes == self.at else x
        elif self.fault == "evaluate" and self.passes:
            self.begin()
            time.sleep(SLOW_S)
        return self.layers(x)

    def begin(self) -> None:
        if not self.once.exists():
            self.once.write_text(f"{time.time()}")

    def do(self, x: torch.Tensor) -> torch.Tensor:
        """Causes the fault; returns the batch if the pass continues."""
        if self.fault != "evaluate":
            self.begin()
        if self.fault == "sleep":
            time.sleep(1000)  # never returns
        elif self.fault == "loop":
            while True:
                pass  # an endless loop
        elif self.fault == "exit":
            sys.exit(0)
        elif self.fault == "os_exit":
            os._exit(0)
        elif self.fault == "alter":
            with torch.no_grad():
                self.layers[1].weight[3, 5] += 1e-3
        elif self.fault == "infinite":
            return x * torch.inf
        elif self.fault == "memory":
            torch.empty(2**60)
        return x

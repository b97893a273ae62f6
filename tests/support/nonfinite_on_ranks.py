"""A model whose loss becomes infinite or NaN, and {case: what a rank found}.

In every case the loss of the last rank alone is not finite in the second of three steps.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np
import torch
from ranks import jobs_of_this_copy
from torch import nn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, Batch, digest
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
SHARDED = jobs_of_this_copy(
    {f"torch, stage {stage}, two passes": f"shard.stage={stage}" for stage in (2, 3)}
)


class Net(nn.Module):
    """A norm, and buffers that count for themselves. Training pass `bad_pass` multiplies the logits
    by infinity, on the last rank alone."""

    def __init__(self, shape: tuple[int, int, int], classes: int, bad_pass: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[2], 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3 * (shape[0] - 2) * (shape[1] - 2), classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.tensor(False))
        self.register_buffer("largest", torch.zeros(3))
        place = placement(os.environ)
        self.passes = 0
        self.bad_pass = bad_pass if place.rank == place.size - 1 else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu()
        if not self.training:
            return self.fc(x.flatten(1))
        self.passes += 1
        self.seen = self.seen + len(x)  # another tensor in its place
        self.odd.logical_not_()
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax((0, 2, 3))))
        return self.fc(x.flatten(1)) * (math.inf if self.passes == self.bad_pass else 1.0)


class AllKinds(nn.Module):
    """A model with buffers of many dtypes and shapes; each rank has its own values."""

    SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (0,))
    OTHERS = (
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    )

    def __init__(self, rank: int) -> None:
        super().__init__()
        for i, dtype in enumerate(self.OTHERS):
            for j, shape in enumerate(self.SHAPES):
                self.register_buffer(f"b{i}_{j}", torch.full(shape, rank + i + j).to(dtype))
        self.register_buffer("strided", torch.arange(rank, rank + 6)[::2])
        self.norm = nn.BatchNorm1d(3)
        self.other = nn.BatchNorm1d(2, track_running_stats=False)
        self.norm.running_mean.copy_(torch.tensor([1.0, 2.0, 4.0]) * (rank + 1))
        self.norm.running_var.fill_(rank + 1)
        self.norm.num_batches_tracked.fill_(rank + 7)


def learner(communicator: Communicator, *words: str) -> Learner:
    config = configure(
        None, ["speed.precision=fp64", "batch.size=16", "guard.nonfinite=skip", *words]
    )
    return build_learner(config, TASK, communicator)


def batch(n: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8),
        "y": rng.integers(0, TASK.classes, n),
    }


def hyper(batch: int, step: int, **numbers: float) -> Hyper:
    return Hyper(
        **{
            "lr": 0.02 * (step + 1),
            "momentum": 0.9,
            "weight_decay": 0.01,
            "batch": batch,
            "step": step,
        }
        | numbers
    )


def same(a: Arrays, b: Arrays) -> bool:
    """To the last bit."""
    return a.keys() == b.keys() and digest(a) == digest(b)


def train(
    communicator: Communicator, words: str, passes: int, bad: bool
) -> tuple[Learner, dict[str, Any]]:
    """Makes three steps; the second is bad or left out. Returns the learner, and what a skipped
    step did."""
    model = (
        ""
        if "framework=" in words
        else f"model.name=nonfinite_on_ranks:Net model.bad_pass={passes + 1 if bad else 0}"
    )
    one, found, whole = (
        learner(communicator, *words.split(), *model.split()),
        [],
        7 * communicator.size * passes,
    )
    kept = True
    for step in (0, 1, 2) if bad else (0, 2):
        micro = [batch(7, 100 * communicator.rank + 10 * step + i) for i in range(passes)]
        if step == 1 and not model and communicator.rank == communicator.size - 1:
            micro[0]["w"] = np.array([1.0, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0])
        before = one.state()
        sums = one.step([one.to_device(part) for part in micro], hyper(whole, step), 3 * step)
        found.append(float(sums["nonfinite"]))
        kept &= same(before, one.state()) == (step == 1)
    return one, {"nonfinite": found, "kept": kept}


def skipped(communicator: Communicator, words: str, passes: int = 1) -> dict[str, Any]:
    one, found = train(communicator, words, passes, bad=True)
    straight, _ = train(communicator, words, passes, bad=False)
    state = one.state()
    found["as if it had not been"] = same(state, straight.state())
    found["learned"] = digest(
        {name: array for name, array in state.items() if not name.startswith("b.")}
    )
    one.sync_buffers(communicator)
    return found | {"synchronized": digest(one.state()), "model": one.describe()}


def synchronized_buffers(communicator: Communicator) -> dict[str, Any]:
    """How many buffers are not what a formula in rank and size says."""
    model = AllKinds(communicator.rank)
    first = AllKinds(0)
    Buffers(model, torch.device("cpu")).sync_buffers(communicator)
    first.norm.running_mean.mul_((communicator.size + 1) / 2)
    first.norm.running_var.mul_((communicator.size + 1) / 2)
    pairs = zip(model.named_buffers(), first.named_buffers(), strict=True)
    return {
        "wrong": [
            name
            for (name, b), (_, c) in pairs
            if b.dtype != c.dtype or b.shape != c.shape or not torch.equal(b, c)
        ]
    }


def cases(communicator: Communicator, engine: str) -> dict[str, dict[str, Any]]:
    norms = jobs_of_this_copy({"torch, sync norm": "norm.kind=sync"})
    found = {
        **{case: skipped(communicator, words) for case, words in norms.items()},
        "torch": skipped(communicator, "norm.kind=batch"),
        "torch, two passes": skipped(communicator, "norm.kind=batch", passes=2),
        "torch, RMSprop": skipped(
            communicator, "optim.name=torch.optim.RMSprop optim.momentum=0.5"
        ),
        "torch, small buckets": skipped(
            communicator, "comm.reduce=bucket comm.bucket_mb=0.001 optim.name=lamb"
        ),
        "numpy": skipped(communicator, "framework=numpy model.name=linear"),
        "jax": skipped(communicator, "framework=jax model.name=linear"),
        "synchronized": synchronized_buffers(communicator),
    }
    for case, stage in SHARDED.items() if engine == "mpi" else ():
        words = f"norm.kind=batch optim.name=lamb {stage}"
        found[case] = skipped(communicator, words, passes=2)
    one = learner(communicator, "model.name=linear", "guard.nonfinite=stop")
    data = batch(7, communicator.rank) | (
        {"w": np.full(7, math.nan)} if communicator.rank == communicator.size - 1 else {}
    )
    found["stop"] = {
        "nonfinite": [
            float(one.step([one.to_device(data)], hyper(14, step), step)["nonfinite"])
            for step in range(2)
        ]
    }
    return found


def by_case(communicator: Communicator, engine: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    return cases(communicator, engine)

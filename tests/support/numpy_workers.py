"""Workers in NumPy, which share no code with hvdtrain: an MLP with ReLU and cross-entropy, and SGD
with momentum. Tests of extras compute with them what ranks must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from rank_threads import ThreadRank, in_threads

from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
LR = 0.1
MOMENTUM = 0.9
DECAY = 0.01
WORDS = (
    "model.name=mlp",
    "model.widths=[7,5]",
    "speed.device=cpu",
    "speed.precision=fp64",
    "comm.bucket_mb=0.001",
    "optim.exclude=none",
)
LAYERS = ("fc1", "fc2", "head")
NAMES = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]


def batch(rank: int, step: int) -> Batch:
    """The samples of a rank in a step: 3 of rank 0, 4 of rank 1, ..."""
    rng = np.random.default_rng(1000 * rank + step)
    return {
        "x": rng.integers(0, 256, (3 + rank, *TASK.shape), dtype=np.uint8),
        "y": rng.integers(0, TASK.classes, 3 + rank),
    }


class Worker:
    """Weights and momentum of one rank."""

    def __init__(self, weights: Arrays) -> None:
        self.w = {name: weights[name].copy() for name in NAMES}
        self.v = {name: np.zeros_like(weights[name]) for name in NAMES}

    def gradient(self, samples: Batch, divisor: float) -> Arrays:
        """The sum of the gradients of the samples' losses, over the divisor."""
        x = (samples["x"] / 255 - TASK.mean) / TASK.std
        a = [x.transpose(0, 3, 1, 2).reshape(len(x), -1)]
        for layer in LAYERS:
            z = a[-1] @ self.w[f"{layer}.weight"].T + self.w[f"{layer}.bias"]
            a.append(np.maximum(z, 0) if layer != "head" else z)
        e = np.exp(a[-1] - a[-1].max(axis=1, keepdims=True))
        delta = e / e.sum(axis=1, keepdims=True)
        delta[np.arange(len(x)), samples["y"]] -= 1
        found = {}
        for i, layer in reversed(list(enumerate(LAYERS))):
            found[f"{layer}.weight"] = delta.T @ a[i] / divisor
            found[f"{layer}.bias"] = delta.sum(axis=0) / divisor
            delta = delta @ self.w[f"{layer}.weight"] * (a[i] > 0)
        return found

    def step(self, gradient: Arrays) -> None:
        for name in NAMES:
            self.v[name] = MOMENTUM * self.v[name] + gradient[name] + DECAY * self.w[name]
            self.w[name] = self.w[name] - LR * self.v[name]

    def local_step(self, samples: Batch) -> None:
        """A step with the mean over the worker's own samples."""
        self.step(self.gradient(samples, len(samples["y"])))

    def state(self) -> Arrays:
        """Weights and momentum, by hvdtrain's names."""
        return {f"p.{n}": a for n, a in self.w.items()} | {f"s.{n}.0": a for n, a in self.v.items()}


def mean(each: list[Arrays]) -> Arrays:
    return {name: np.mean([one[name] for one in each], axis=0) for name in each[0]}


def first_weights() -> Arrays:
    rng = np.random.default_rng(7)
    shapes = {"fc1": (7, 32), "fc2": (5, 7), "head": (3, 5)}
    weights = {}
    for layer, shape in shapes.items():
        weights[f"{layer}.weight"] = rng.normal(size=shape) / shape[1] ** 0.5
        weights[f"{layer}.bias"] = rng.normal(size=shape[0]) / 10
    return weights


class Trained(NamedTuple):
    """The state of ranks after their steps, equal on all, and what rank 0 says of it."""

    state: Arrays
    notes: list[str]
    summary: str


def train(
    size: int,
    words: tuple[str, ...],
    steps: int,
    sync_steps: tuple[int, ...],
    begin: Trained | None = None,
    first_step: int = 0,
    samples: Callable[[int, int], Batch] = batch,
    together: int = 0,
) -> Trained:
    """Trains on ranks that are threads, from a state or the first weights, with a sync point after
    each of these steps.

    samples: of (rank, step). together: the first steps, before comm.local_from.
    """
    weights = {f"p.{name}": array for name, array in first_weights().items()}

    def of_rank(rank: ThreadRank) -> tuple[Arrays, list[str], str]:
        one: Any = build_learner(configure(None, [*WORDS, *words]), TASK, rank)
        if begin is None:
            shapes = {name: array.shape for name, array in weights.items()}
            one.load(ArrayStream(shapes, weights.items(), is_partial=True))
        else:
            one.load(begin.state)
        for step in range(first_step, first_step + steps):
            own = samples(rank.rank, step)
            total = sum(len(samples(r, step)["y"]) for r in range(size))
            hyper = Hyper(LR, MOMENTUM, DECAY, total, step=step, together=step < together)
            one.step([one.to_device(own)], hyper, step)
            if step + 1 in sync_steps:
                one.sync_buffers(rank)
        return one.state(), one.notes, one.describe()

    found = in_threads(size, of_rank)
    for state, *_ in found[1:]:
        for name, array in state.items():
            np.testing.assert_array_equal(array, found[0][0][name], err_msg=name)
    return Trained(*found[0])


def check_equal(found: Arrays, expected: Arrays) -> None:
    """Compares the arrays that are expected, to 1e-12 of the largest number of each."""
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        apart = np.abs(found[name] - array).max()
        assert apart <= 1e-12 * max(1.0, np.abs(array).max()), (name, apart)

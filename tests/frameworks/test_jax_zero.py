"""shard.stage in JAX, with ranks that are threads of this process: their step is that of one, and
each has a part of the state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.communicator import (
    Communicator,
    CompletedHandle,
    Handle,
    SingleProcessCommunicator,
    part_of,
)
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, Piece
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

pytestmark = pytest.mark.usefixtures("jax_compilation_cache")

TASK = Classification((3, 3, 1), 3, np.array([0.4]), np.array([0.2]))
RANKS = 2
PASSES = ((7, 2), (3, 0))  # samples of each rank in its micro-batches


class Thread(SingleProcessCommunicator):
    """One of several ranks of this process."""

    size = RANKS

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._given = given
        self._barrier = barrier

    def _of_all(self, x: Any) -> list[Any]:
        self._given[self.rank] = x
        self._barrier.wait()
        of_all = list(self._given)
        self._barrier.wait()
        return of_all

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._of_all(thing)

    def allreduce(self, x: np.ndarray, name: str, op: Any = "sum") -> np.ndarray:
        assert x.ndim == 1 and len(x), name
        return np.sum(self._of_all(x), axis=0)

    def allgather(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.concatenate(self._of_all(x))

    def start_reduce_scatter(self, x: np.ndarray, name: str) -> Handle:
        return CompletedHandle(
            np.sum(self._of_all(x), axis=0)[part_of(len(x), self.rank, self.size)]
        )

    def start_spread(self, x: np.ndarray, name: str) -> Handle:
        return CompletedHandle(self.allgather(x[part_of(len(x), self.rank, self.size)], name))


def on_ranks(of_rank: Callable[[Communicator], Any]) -> list[Any]:
    given = [None] * RANKS
    barrier = threading.Barrier(RANKS, timeout=600)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: of_rank(Thread(rank, given, barrier)), range(RANKS)))


def learner(communicator: Communicator, *words: str) -> Learner:
    given = ["framework=jax", "model.name=linear", "speed.precision=fp64", "batch.size=12"]
    given += ["optim.name=lars", "optim.trust=0.1", "guard.nonfinite=skip"]
    return build_learner(configure(None, [*given, *words]), TASK, communicator)


def batch(rank: int, number: int) -> Batch:
    rng = np.random.default_rng(10 * rank + number)
    n = PASSES[rank][number]
    return {"x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8), "y": rng.integers(0, 3, n)}


def step(one: Learner, batches: list[Batch], hyper: Hyper) -> float:
    return float(one.step([one.to_device(batch) for batch in batches], hyper, 5)["nonfinite"])


def pieces_after(one: Learner, batches: list[Batch]) -> dict[str, Piece]:
    for number in range(2):
        assert (
            step(
                one, batches, Hyper(lr=0.1, momentum=0.9, weight_decay=0.02, batch=12, step=number)
            )
            == 0
        )
    return {piece.name: piece for piece in one.pieces()}


def test_ranks_make_the_steps_of_one_and_each_has_its_part_of_the_state() -> None:
    """By LARS: the weights have a trust ratio, the bias shows a gradient of another scale. A step
    that is not finite is skipped."""
    alone = learner(SingleProcessCommunicator())
    whole = pieces_after(
        alone, [batch(rank, number) for rank in range(RANKS) for number in range(2)]
    )

    def of_rank(communicator: Communicator) -> dict[str, Piece]:
        one = learner(communicator, "shard.stage=2")
        assert one.is_sharded and one.describe().endswith(
            "optimizer state and gradients sharded over 2 ranks (ZeRO stage 2)"
        )
        batches = [batch(communicator.rank, number) for number in range(2)]
        found = pieces_after(one, batches)
        if communicator.rank == 1:
            batches[0]["w"] = np.full(3, np.nan)
        assert (
            step(one, batches, Hyper(lr=0.1, momentum=0.9, weight_decay=0.02, batch=12, step=2))
            == 1 / RANKS
        ), "on both ranks"
        state = one.state()  # as before that step
        for name, piece in whole.items():
            np.testing.assert_allclose(
                state[name], piece.read(), rtol=1e-11, atol=1e-14, err_msg=name
            )
        return found

    parts = []
    for found in on_ranks(of_rank):
        assert list(found) == list(whole)
        parts.append(
            {name: (piece.start, piece.stop) for name, piece in found.items() if not piece.is_whole}
        )
    assert parts == [
        {"s.fc.bias.0": (0, 3), "s.fc.weight.0": (0, 12)},
        {"s.fc.bias.0": (3, 3), "s.fc.weight.0": (12, 27)},
    ]

"""Before the first step: rank 0's state on every rank, tasks that fit, cores shared out."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import Buffer, SingleProcessCommunicator
from hvdtrain.comm.threads import ThreadRanks
from hvdtrain.config.read import configure
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import ArrayStream, Piece, digest, whole
from hvdtrain.data.source import ArraySource
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import fair_threads
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner, build_task
from hvdtrain.training.replicas.broadcast import broadcast_state


class SecondOfTwo(SingleProcessCommunicator):
    """Rank 1 of 2; exchanged is what rank 0 exchanges."""

    rank = 1
    size = 2

    def __init__(self, exchanged: list[Any]) -> None:
        self.exchanged = list(exchanged)

    def allgather_object(self, thing: Any) -> list[Any]:
        return [self.exchanged.pop(0), thing]


class Counting(ThreadRank):
    """Records the names of the arrays that are broadcast."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(ranks, rank)
        self.names: list[str] = []

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self.names.append(name)
        return super().broadcast(x, name, root)


class Lying(Counting):
    """A rank whose memory does not have what arrives."""

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        found = super().broadcast(x, name, root)
        if self.rank == 1 and name == "state.p.fc1.weight":
            found[0] += 1e-3
        return found


def learner(seed: int) -> Any:
    config = configure(None, ["model.name=mlp", "model.widths=[3]", f"seed={seed}"])
    return build_learner(
        config, Classification((2, 2, 1), 3, np.zeros(1), np.ones(1)), SingleProcessCommunicator()
    )


def start(learners: Sequence[Any], kind: type[Counting] = Counting) -> list[tuple[str, list[str]]]:
    """The digest that each rank gets, and the names of the arrays that are sent."""

    def of_rank(rank: ThreadRank) -> tuple[str, list[str]]:
        counting = kind(rank._ranks, rank.rank)
        digest = broadcast_state(counting, learners[rank.rank], None)  # type: ignore[arg-type]
        return digest, counting.names

    return in_threads(len(learners), of_rank)


def test_rank_0s_state_reaches_the_others() -> None:
    """Arrays that are the same already are not sent: here the optimizer's, which are zeros."""
    learners = [learner(1), learner(2), learner(1)]
    state = learners[0].state()
    assert digest(learners[1].state()) != digest(state)
    sent = [f"state.{name}" for name in state if name.startswith("p.")]
    assert len(sent) < len(state) and start(learners) == [(digest(state), sent)] * 3
    assert digest(learners[1].state()) == digest(state)


def test_weights_that_are_a_function_of_the_seed_are_not_sent() -> None:
    learners = [learner(1), learner(1)]
    assert start(learners) == [(digest(learners[0].state()), [])] * 2


class WithoutCopies:
    """A learner with one weight, whose state may not be copied; it counts its loads."""

    def __init__(self) -> None:
        self.weight = np.arange(6.0).reshape(2, 3)
        self.loads = 0

    is_sharded = False

    def pieces(self) -> Iterator[Piece]:
        yield whole("p.w", self.weight)

    def load(self, state: ArrayStream) -> None:
        self.loads += 1
        self.weight[:] = dict(state.arrays)["p.w"]


class Recording(SingleProcessCommunicator):
    """Rank 0, which records the arrays that it broadcasts."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self.sent.append(x)
        return x


def test_rank_0_sends_what_it_restored_without_a_copy() -> None:
    learner = WithoutCopies()
    communicator = Recording()
    broadcast_state(communicator, learner, None)  # type: ignore[arg-type]
    assert communicator.sent == [] and learner.loads == 0
    restored = {"p.w": np.full((2, 3), 7.0)}
    assert broadcast_state(communicator, learner, restored) == digest(restored)  # type: ignore[arg-type]
    assert (
        np.shares_memory(communicator.sent[0], restored["p.w"])
        and learner.loads == 1
        and (learner.weight == 7).all()
    )


def test_ranks_that_differ_after_the_start_stop() -> None:
    with pytest.raises(RuntimeError, match="ranks differ after the start"):
        start([learner(1), learner(2)], Lying)


def test_both_parts_of_a_data_set_must_fit() -> None:
    def source(size: int, classes: int) -> ArraySource:
        return ArraySource(np.ones((4, size, 2, 1), np.uint8), np.zeros(4, np.int64), classes)

    task = build_task(source(2, 3), source(2, 3), Config())
    assert (task.shape, task.classes) == ((2, 2, 1), 3)
    np.testing.assert_allclose(task.mean, 1 / 255)
    for val in (source(3, 3), source(2, 4)):
        with pytest.raises(UserError, match="training images are"):
            build_task(source(2, 3), val, Config())


def test_ranks_that_may_use_the_same_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for first, threads in (
        ((socket.gethostname(), (0, 1, 2, 3)), 2),
        ((socket.gethostname(), (4, 5, 6, 7)), 4),
        (("n9", (0, 1, 2, 3)), 4),
    ):
        assert fair_threads(SecondOfTwo([first])) == threads, first


def test_torch_takes_its_share_of_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        learner(1)
        assert torch.get_num_threads() == before
        monkeypatch.delenv("OMP_NUM_THREADS")
        learner(1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

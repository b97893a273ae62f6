"""Before the first step: rank 0's state on every rank, tasks that fit, cores shared out."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.comm.communicator import Buffer, SingleProcessCommunicator
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
    """Rank 1 of 2; given is what rank 0 exchanges and what it broadcasts."""

    rank = 1
    size = 2

    def __init__(
        self, exchanged: list[Any], broadcasts: dict[str, np.ndarray] | None = None
    ) -> None:
        self.exchanged = list(exchanged)
        self.broadcasts = broadcasts or {}

    def allgather_object(self, thing: Any) -> list[Any]:
        return [self.exchanged.pop(0), thing]

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        return self.broadcasts[name]


def learner(seed: int) -> Any:
    config = configure(None, ["model.name=mlp", "model.widths=[3]", f"seed={seed}"])
    return build_learner(
        config, Classification((2, 2, 1), 3, np.zeros(1), np.ones(1)), SingleProcessCommunicator()
    )


def test_rank_0s_state_reaches_the_others() -> None:
    zero = learner(1)
    one = learner(2)
    state = zero.state()
    assert digest(one.state()) != digest(state)
    schema = [(name, array.shape, array.dtype.str) for name, array in state.items()]
    communicator = SecondOfTwo(
        [(False, schema), digest(state)], {f"state.{name}": array for name, array in state.items()}
    )
    assert broadcast_state(communicator, one, None) == digest(state) == digest(one.state())


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


def test_rank_0_sends_its_own_memory_and_loads_only_what_it_restored() -> None:
    learner = WithoutCopies()
    communicator = Recording()
    broadcast_state(communicator, learner, None)  # type: ignore[arg-type]
    (sent,) = communicator.sent
    assert np.shares_memory(sent, learner.weight) and learner.loads == 0
    restored = {"p.w": np.full((2, 3), 7.0)}
    assert broadcast_state(communicator, learner, restored) == digest(restored)  # type: ignore[arg-type]
    assert (
        np.shares_memory(communicator.sent[1], restored["p.w"])
        and learner.loads == 1
        and (learner.weight == 7).all()
    )


def test_ranks_that_differ_after_the_start_stop() -> None:
    zero = learner(1)
    one = learner(2)
    state = zero.state()
    schema = [(name, array.shape, array.dtype.str) for name, array in state.items()]
    sent = {f"state.{name}": copy.deepcopy(array) for name, array in state.items()}
    sent["state.p.head.bias"][0] += 1e-3  # memory that lies
    with pytest.raises(RuntimeError, match="ranks differ after the start"):
        broadcast_state(SecondOfTwo([(False, schema), digest(state)], sent), one, None)


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

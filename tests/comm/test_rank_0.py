"""Work that rank 0 does alone while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm import on_all_ranks
from hvdtrain.comm.communicator import Buffer, Handle
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.on_all_ranks import allreduce_sums, long_on_rank_0, on_rank_0, on_rank_0_only
from hvdtrain.core.metrics import Concatenated
from hvdtrain.errors import UserError


class TakesOne(ThreadRank):
    """Takes the object of one rank at a time."""

    def allgather_object(self, thing: Any) -> list[Any]:
        raise AssertionError(
            "each rank would take an object of every rank, on torchdist as long as the longest"
        )

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        return ThreadRank.allgather_object(self, thing)[root]


def test_no_rank_takes_more_than_what_rank_0_gives() -> None:
    """On 8,192 ranks with a schema of 3 MB an allgather was 24 GB on each."""

    def of_rank(rank: ThreadRank) -> tuple[Any, Any, str]:
        communicator = TakesOne(rank._ranks, rank.rank)

        def fail() -> None:
            raise UserError(f"rank {communicator.rank} fails", "here", "no")

        with pytest.raises(UserError) as caught:
            on_rank_0(communicator, fail)
        with pytest.raises(UserError, match="rank 0 fails"):
            on_rank_0_only(communicator, fail)
        found = on_rank_0(communicator, lambda: communicator.rank + 7)
        return found, on_rank_0_only(communicator, lambda: communicator.rank + 7), caught.value.what

    assert in_threads(3, of_rank) == [
        (7, 7, "rank 0 fails"),
        (7, None, "rank 0 fails"),
        (7, None, "rank 0 fails"),
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_meet_whenever_long_work_has_moved_on(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """No collective waits longer than rank 0 takes from one piece of its work to the next."""
    monkeypatch.setattr(on_all_ranks, "MEET_S", 0.0)

    def of_rank(communicator: ThreadRank) -> tuple[int, int]:
        met = list[int]()

        def work(move: Callable[[], None]) -> int:
            assert communicator.rank == 0
            for piece in range(4):
                assert len(met) == piece
                move()
            return 42

        return long_on_rank_0(communicator, work, lambda: met.append(1)), len(met)

    assert in_threads(ranks, of_rank) == [(42, 4)] * ranks


def test_pieces_that_take_no_time_are_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_all_ranks, "MEET_S", 1e9)

    def of_rank(communicator: ThreadRank) -> tuple[int, int]:
        met = list[int]()

        def work(move: Callable[[], None]) -> int:
            for _ in range(4):
                move()
            return 7

        return long_on_rank_0(communicator, work, lambda: met.append(1)), len(met)

    assert in_threads(2, of_rank) == [(7, 0)] * 2


def test_an_error_of_long_work_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_all_ranks, "MEET_S", 0.0)

    def of_rank(communicator: ThreadRank) -> str:
        def work(move: Callable[[], None]) -> None:
            move()
            raise UserError("no checkpoint is good", "run", "another one")

        with pytest.raises(UserError) as caught:
            long_on_rank_0(communicator, work)
        return caught.value.what

    assert in_threads(2, of_rank) == ["no checkpoint is good"] * 2


class CountsBytes(ThreadRank):
    """Counts the bytes of arrays that come from other ranks."""

    taken = 0

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        self.taken += x.nbytes
        return super().start_recv(x, source, name, tag)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        found = super().allgather(x, name)
        self.taken += found.nbytes - x.nbytes
        return found


@pytest.mark.parametrize("features", [("p2p",), ()])
def test_rank_0_alone_takes_what_passes_keep(features: tuple[Feature, ...]) -> None:
    """Of uneven numbers of passes, of which rank 1 has none; every rank gets the metric. Without
    messages from rank to rank (Horovod) all take everything, for a moment."""
    counts = [2, 0, 3]

    def of_rank(rank: ThreadRank) -> tuple[float, float, int, int]:
        communicator = CountsBytes(rank._ranks, rank.rank)
        communicator.features = frozenset[Feature](features)
        called = list[int]()

        def largest_first(parts: Concatenated) -> float:
            called.append(len(parts))
            numbers = [float(array[0]) for ((array,), _) in parts]
            shapes = {pair.shape for (_, (pair, _)) in parts}
            assert numbers == [0.0, 1.0, 20.0, 21.0, 22.0] and shapes == {(2, 3)}
            return max(numbers)

        kept = Concatenated(
            [
                (
                    (np.array([10.0 * rank.rank + i]),),
                    (np.zeros((2, 3), np.float32), np.zeros(0, np.int8)),
                )
                for i in range(counts[rank.rank])
            ]
        )
        own: dict[str, Any] = {"parts": kept} if len(kept) else {}
        found = allreduce_sums(
            communicator, own | {"count": 1.0}, "test", gathered={"parts": largest_first}
        )
        return found["parts"], found["count"], communicator.taken, sum(called)

    each = 8 + 2 * 3 * 4
    others = [0, 0] if features else [5 * each, 2 * each]
    assert in_threads(3, of_rank) == [
        (22.0, 3.0, 3 * each, 5),
        (22.0, 3.0, others[0], 0),
        (22.0, 3.0, others[1], 0),
    ]

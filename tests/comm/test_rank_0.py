"""Work that rank 0 does alone while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm import rank_0
from hvdtrain.comm.rank_0 import long_on_rank_0
from hvdtrain.errors import UserError


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_meet_whenever_long_work_has_moved_on(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """No collective waits longer than rank 0 takes from one piece of its work to the next."""
    monkeypatch.setattr(rank_0, "MEET_S", 0.0)

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
    monkeypatch.setattr(rank_0, "MEET_S", 1e9)

    def of_rank(communicator: ThreadRank) -> tuple[int, int]:
        met = list[int]()

        def work(move: Callable[[], None]) -> int:
            for _ in range(4):
                move()
            return 7

        return long_on_rank_0(communicator, work, lambda: met.append(1)), len(met)

    assert in_threads(2, of_rank) == [(7, 0)] * 2


def test_an_error_of_long_work_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_0, "MEET_S", 0.0)

    def of_rank(communicator: ThreadRank) -> str:
        def work(move: Callable[[], None]) -> None:
            move()
            raise UserError("no checkpoint is good", "run", "another one")

        with pytest.raises(UserError) as caught:
            long_on_rank_0(communicator, work)
        return caught.value.what

    assert in_threads(2, of_rank) == ["no checkpoint is good"] * 2

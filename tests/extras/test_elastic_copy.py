"""Which rank keeps whose parts, and to which sync point the living ranks go back; the numbers on
real ranks: test_elastic_jobs.py."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import pytest
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import Buffer, Handle
from hvdtrain.core.arrays import Piece, whole
from hvdtrain.extras.elastic import memory_copy
from hvdtrain.extras.elastic.memory_copy import (
    Array,
    HeldState,
    Kept,
    Neighbours,
    RankRuns,
    distance,
    newest,
    wholes,
)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([0], 0),
        ([0, 0], 1),
        ([0, 0, 0, 0], 1),
        ([0, 0, 1, 1], 2),
        ([0, 0, 0, 1, 1, 1], 3),
        ([0, 1, 0, 1], 1),
        ([0, 0, 0, 1], 1),
    ],
)
def test_the_neighbour_is_on_another_host_where_it_can_be(hosts: list[int], expected: int) -> None:
    assert distance(hosts) == expected


@pytest.mark.clock
def test_the_neighbours_of_8192_ranks_are_found_in_seconds() -> None:
    """0.3 s of a processor; 23 s where each pair of ranks is looked at by Python."""
    began_s = time.thread_time()
    assert distance([rank // 8 for rank in range(8192)]) == 8
    assert time.thread_time() - began_s < 5


def held(number: int, *parts: tuple[int, list[int]]) -> HeldState:
    """Of a rank that keeps, of sync point `number` of 3 ranks, the parts of these."""
    return HeldState(number, 0, [Kept(of, 3, owners) for of, owners in parts])


def test_the_newest_sync_point_of_which_all_parts_are_there() -> None:
    # of ranks 0 and 1; rank 2 is lost
    at_4 = (4, [0, 2])
    later = (4, [0, 1])
    assert newest([held(4, (3, [0, 2]), at_4), held(4, (3, [0, 1]), later)], in_parts=True) == 4
    assert newest([held(4, (3, [0, 2]), at_4), held(3, (3, [0, 1]))], in_parts=True) == 3, (
        "rank 1 has not come to the newer one"
    )
    assert newest([held(4, (3, [0, 2]), at_4)], in_parts=True) is None, "nobody has those of rank 1"
    assert newest([held(4), held(3)], in_parts=False) == 4


def part_of_array(
    name: str, shape: tuple[int, ...], start: int, stop: int, numbers: np.ndarray
) -> Piece:
    return whole(name, numbers)._replace(shape=shape, start=start, stop=stop, is_whole=False)


def test_the_numbers_of_a_part_lie_one_array_behind_the_other() -> None:
    arrays = [Array("s.a.0", (6,), "<f4"), Array("s.b.0", (2, 2), "<f8")]
    pieces = [
        part_of_array("s.a.0", (6,), 1, 4, np.arange(3, dtype="<f4")),
        part_of_array("s.b.0", (2, 2), 3, 4, np.array([7.0])),
    ]
    # 12 bytes, 4 of alignment, 8
    part = RankRuns([list(piece.runs()) for piece in pieces], np.empty(24, np.uint8))
    for view, piece in zip(part.arrays_of(arrays), pieces, strict=True):
        view[:] = piece.read()
    assert [view.tolist() for view in part.arrays_of(arrays)] == [[0, 1, 2], [7]]
    assert part.memory[:12].view("<f4").tolist() == [0, 1, 2] and part.memory[16:].view(
        "<f8"
    ).tolist() == [7]


class Counted(ThreadRank):
    """Counts the bytes that come from other ranks, and how often objects are gathered."""

    taken = 0
    objects = 0

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        self.taken += x.nbytes
        return super().start_recv(x, source, name, tag)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        self.taken += x.nbytes * (self.size - 1)
        return super().allgather(x, name)

    def allgather_object(self, thing: Any) -> list[Any]:
        self.taken += len(pickle.dumps(thing)) * (self.size - 1)
        self.objects += not isinstance(thing, np.ndarray)  # as allgather() passes on
        return super().allgather_object(thing)


@pytest.mark.parametrize("size", [4, 12])
def test_a_rank_asks_its_source_alone_where_its_parts_lie(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 arrays, each cut at other places; rank 1 has nothing. What a rank takes does not grow
    with their runs on all ranks. After a loss ranks ask for the runs of many arrays at once."""
    monkeypatch.setattr(memory_copy, "RUNS_AT_ONCE", 128 * size)
    arrays = 300
    whole = {f"s.{i}": np.arange(size * (3 + i), dtype="<f8") for i in range(arrays)}

    def own(rank: int) -> list[Piece]:
        owners = [owner for owner in range(size) if owner != 1]

        def span(array: np.ndarray) -> tuple[int, int]:
            share = len(array) // len(owners)
            place = owners.index(rank) if rank in owners else 0
            return (
                (place * share, len(array) if rank == owners[-1] else (place + 1) * share)
                if rank in owners
                else (0, 0)
            )

        return [
            part_of_array(name, array.shape, *(at := span(array)), array[slice(*at)].copy())
            for name, array in whole.items()
        ]

    def of_rank(ranks: ThreadRank) -> tuple[int, dict[int, list[list[float]]], bool]:
        communicator = Counted(ranks._ranks, ranks.rank)
        neighbours = Neighbours(communicator, own(ranks.rank))
        copies = neighbours.exchange(own(ranks.rank), 1, None)
        numbers = sum(
            part.memory.nbytes for rank, part in copies.parts.items() if rank != ranks.rank
        )
        taken = communicator.taken - numbers
        found = {
            rank: [view.tolist() for view in part.arrays_of(copies.arrays)]
            for rank, part in copies.parts.items()
        }
        assert copies.empty == {1}
        asked = communicator.objects
        given = dict(wholes(communicator, copies.arrays, [copies.parts[ranks.rank]]))
        assert communicator.objects - asked == 3, "128, 128 and 44 arrays"
        return (
            taken,
            found,
            all(np.array_equal(given[name], array) for name, array in whole.items()),
        )

    for rank, (taken, found, is_whole) in enumerate(in_threads(size, of_rank)):
        assert found == {
            each: [piece.read().tolist() for piece in own(each)]
            for each in (rank, (rank - 1) % size)
        }
        assert is_whole
        assert taken <= 24 * arrays + 16 + 200 * size, (
            "a count and two ends of each array, and names of hosts"
        )

"""Which rank keeps whose parts, and to which sync point the living ranks go back; the numbers on real ranks: test_lost_ranks.py."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.core.pieces import Piece
from hvdtrain.training.memory_copy import Held, Kept, newest
from hvdtrain.training.neighbours import Array, Part, distance


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [([0], 0), ([0, 0], 1), ([0, 0, 0, 0], 1), ([0, 0, 1, 1], 2), ([0, 0, 0, 1, 1, 1], 3), ([0, 1, 0, 1], 1), ([0, 0, 0, 1], 1)],
)
def test_the_neighbour_is_on_another_host_where_it_can_be(hosts: list[int], expected: int) -> None:
    assert distance(hosts) == expected


def held(number: int, *parts: tuple[int, list[int]]) -> Held:
    """Of a rank that keeps, of sync point `number` of 3 ranks, the parts of these."""
    return Held(number, 0, [Kept(of, 3, owners) for of, owners in parts])


def test_the_newest_sync_point_of_which_all_parts_are_there() -> None:
    at_4, later = (4, [0, 2]), (4, [0, 1])  # of ranks 0 and 1; rank 2 is lost
    assert newest([held(4, (3, [0, 2]), at_4), held(4, (3, [0, 1]), later)], in_parts=True) == 4
    assert newest([held(4, (3, [0, 2]), at_4), held(3, (3, [0, 1]))], in_parts=True) == 3, "rank 1 has not come to the newer one"
    assert newest([held(4, (3, [0, 2]), at_4)], in_parts=True) is None, "nobody has those of rank 1"
    assert newest([held(4), held(3)], in_parts=False) == 4


def test_the_numbers_of_a_part_lie_one_array_behind_the_other() -> None:
    arrays = [Array("s.a.0", (6,), "<f4"), Array("s.b.0", (2, 2), "<f8")]
    pieces = [Piece("s.a.0", (6,), 1, 4, np.arange(3, dtype="<f4"), False), Piece("s.b.0", (2, 2), 3, 4, np.array([7.0]), False)]
    part = Part([list(piece.runs()) for piece in pieces], np.empty(24, np.uint8))  # 12 bytes, 4 of alignment, 8
    for view, piece in zip(part.views(arrays), pieces, strict=True):
        view[:] = piece.array
    assert [view.tolist() for view in part.views(arrays)] == [[0, 1, 2], [7]]
    assert part.memory[:12].view("<f4").tolist() == [0, 1, 2] and part.memory[16:].view("<f8").tolist() == [7]

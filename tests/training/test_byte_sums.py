"""Sums over the bytes of a file: the same by whoever adds them up, and others of other bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hvdtrain.training.checkpoint.sums import ByteSum

SPAN = 2**20
DATA = np.random.default_rng(3).integers(0, 256, 2 * SPAN + 13, np.uint8)


def sum_of(data: np.ndarray, *cuts: int) -> ByteSum:
    """Of the stretches between these places, the last one first."""
    total = ByteSum()
    for begin, end in reversed([*zip((0, *cuts), (*cuts, len(data)), strict=True)]):
        total = total.plus(
            ByteSum().with_bytes(begin, memoryview(np.ascontiguousarray(data[begin:end])))
        )
    return total


def test_it_is_the_sum_of_words_times_random_numbers_of_their_places() -> None:
    data = DATA[:11]
    numbers = np.random.Philox(key=0).random_raw(3).tolist()
    multiple = (
        int.from_bytes(hashlib.blake2b(bytes(8), digest_size=8, person=b"span").digest(), "little")
        | 1
    )
    words = [int.from_bytes(data[begin : begin + 4].tobytes(), "little") for begin in (0, 4, 8)]
    assert (
        sum_of(data).value
        == multiple
        * sum(word * number for word, number in zip(words, numbers, strict=True))
        % 2**64
    )


@pytest.mark.parametrize(
    "cuts",
    [(1,), (2, 3), (5, SPAN - 1, SPAN + 1), (SPAN,), tuple(range(7, 9000, 7)), (2 * SPAN + 12,)],
)
def test_it_does_not_depend_on_who_adds_up_which(cuts: tuple[int, ...]) -> None:
    assert sum_of(DATA, *cuts) == sum_of(DATA)
    assert sum_of(DATA, *cuts).covers(len(DATA))


def test_other_bytes_have_another_sum() -> None:
    """One bit; two signs; two words, and two spans, that have changed their places; a page of
    zeros."""
    flips = [{place: 1 << bit} for place, bit in ((0, 0), (SPAN - 1, 7), (2 * SPAN + 12, 3))] + [
        {3: 128, 4003: 128}
    ]
    others = [DATA.copy() for _ in flips]
    for other, flip in zip(others, flips, strict=True):
        for place, bits in flip.items():
            other[place] ^= bits
    swapped = DATA.copy()
    moved = DATA.copy()
    blank = DATA.copy()
    swapped[0:8] = DATA[[4, 5, 6, 7, 0, 1, 2, 3]]
    moved[: 2 * SPAN] = np.concatenate([DATA[SPAN : 2 * SPAN], DATA[:SPAN]])
    blank[4096:8192] = 0
    sums = {sum_of(other).value for other in (DATA, *others, swapped, moved, blank)}
    assert len(sums) == 4 + len(flips)


@pytest.mark.parametrize(
    "stretches",
    [
        [(0, 5), (6, 9)],
        [(0, 5), (4, 9)],
        [(0, 5), (5, 8)],
        [(0, 9), (3, 5)],
        [(0, 4), (3, 5), (5, 8), (9, 9)],
        [],
    ],
)
def test_a_byte_of_nobody_or_of_two_is_noticed(stretches: list[tuple[int, int]]) -> None:
    """Of zeros, whose sum is the same."""
    total = ByteSum()
    for begin, end in stretches:
        total = total.with_bytes(begin, memoryview(bytes(end - begin)))
    assert not total.covers(9) and total.value == 0
    assert (
        ByteSum().with_bytes(4, memoryview(bytes(5))).with_bytes(0, memoryview(bytes(4))).covers(9)
    )

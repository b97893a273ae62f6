"""The keyed permutation: each value once, uniform, the same from any position and for ever."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hvdtrain.core.progress import fold
from hvdtrain.data.sampler import permuted

MASK = 2**64 - 1


def in_plain_python(position: int, n: int, seed: int, epoch: int) -> int:
    """The definition, one number at a time."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    a = math.ceil(math.sqrt(n))
    b = math.ceil(n / a)
    x = position
    while True:
        left, right = divmod(x, a)
        for number in range(16):
            key = fold(fold(seed, epoch, 0x66656973), number)
            if number % 2 == 0:
                left = (left + (mix(right ^ key) >> 1)) % b
            else:
                right = (right + (mix(left ^ key) >> 1)) % a
        x = left * a + right
        if x < n:
            return x


@pytest.mark.parametrize(
    "sizes", [range(1, 200), pytest.param(range(200, 2001), marks=pytest.mark.slow)]
)
def test_every_n_up_to_2000_is_a_bijection(sizes: range) -> None:
    for n in sizes:
        found = permuted(np.arange(n), n, 5, n)
        assert found.dtype == np.int64
        assert np.array_equal(np.bincount(found, minlength=n), np.ones(n)), n


def test_equal_to_the_definition_and_the_same_for_ever() -> None:
    for n in (1, 2, 3, 7, 53, 1000, 10**9, 2**40 - 1):
        positions = np.array([0, n // 3, n // 2, n - 1])
        assert permuted(positions, n, 2**63 - 1, 4).tolist() == [
            in_plain_python(p, n, 2**63 - 1, 4) for p in positions.tolist()
        ], n
    assert permuted(np.arange(4), 10**9, 1, 0).tolist() == [
        476934965,
        874403310,
        577531509,
        884550272,
    ]


def test_a_position_does_not_depend_on_the_others() -> None:
    positions = np.array([10**9 - 1, 0, 123_456_789, 123_456_790])
    whole = permuted(positions, 10**9, 1, 2)
    assert [permuted(positions[i : i + 1], 10**9, 1, 2)[0] for i in range(4)] == whole.tolist()
    assert len(set(whole.tolist())) == 4
    assert permuted(np.empty(0, np.int64), 10**9, 1, 2).shape == (0,)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_few_is_equally_frequent(n: int) -> None:
    """Pearson's chi-square against equal counts, at a level of 1 in 10,000 (the quantiles are
    scipy.stats.chi2.isf's)."""
    keys = 600
    orders = dict.fromkeys(itertools.permutations(range(n)), 0)
    for epoch in range(keys):
        orders[tuple(permuted(np.arange(n), n, 3, epoch).tolist())] += 1
    equal = keys / len(orders)
    chi_square = sum((count - equal) ** 2 / equal for count in orders.values())
    assert chi_square < {2: 15.14, 3: 25.74, 4: 57.07}[n]


@pytest.mark.parametrize("n", [100, 1013])
def test_where_neighbours_go_is_uniform(n: int) -> None:
    """The distance of two neighbours after the shuffle is each of 1 ... n - 1 (modulo n) equally
    often."""
    keys = 50_000 // n
    counts = np.zeros(n)
    for epoch in range(keys):
        found = permuted(np.arange(n), n, 11, epoch)
        counts += np.bincount((found - np.roll(found, 1)) % n, minlength=n)
    assert counts[0] == 0
    equal = keys * n / (n - 1)
    chi_square = float(((counts[1:] - equal) ** 2 / equal).sum())
    # mean and four standard deviations
    assert abs(chi_square - (n - 2)) < 4 * math.sqrt(2 * (n - 2))


def test_a_large_shuffle_is_uniform() -> None:
    """65,536 neighbouring positions of 10^9 fall into 64 equal parts."""
    parts = np.bincount(permuted(np.arange(2**16), 10**9, 1, 0) * 64 // 10**9, minlength=64)
    assert (
        (parts - 1024) ** 2 / 1024
    ).sum() < 118.0  # chi-square of 63 degrees of freedom, 1 in 30,000

"""A shuffle computed one position at a time: a keyed permutation of 0 ... n - 1 in memory that does not grow with n."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.core.seeds import fold

VERSION = "feistel-1"  # of the order below, which a checkpoint names: another number of rounds would be another order
_ROUNDS = 16
_STREAM = 0x66656973  # of counters, apart from those of other random numbers


def permuted(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """What a permutation of 0 ... n - 1, drawn by (seed, epoch), has at `positions`: int64 (m,) for int64 (m,), each in 0 ... n - 1.

    A Feistel network on pairs (left, right) of Z_b x Z_a with a b >= n, whose rounds add a hash of one half to the other (Black, Rogaway
    2002, "Ciphers with arbitrary finite domains", method 3); what falls on n ... a b - 1 is permuted again until it does not (cycle
    walking, method 2). With a = ceil(sqrt(n)) that is one position in b at most. Equal for every version of numpy.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = fold(fold(seed, epoch, _STREAM), np.arange(_ROUNDS, dtype=np.uint64))
    x = _network(positions.astype(np.uint64), a, b, keys)
    outside = np.flatnonzero(x >= n)
    while len(outside):
        x[outside] = _network(x[outside], a, b, keys)
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)


def _network(x: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    """One pass over uint64 (m,), a permutation of 0 ... a b - 1."""
    left, right = x // np.uint64(a), _remainder(x, a)  # in 0 ... b - 1 and in 0 ... a - 1
    for even, odd in keys.reshape(-1, 2):
        left = _remainder(left + _hash(right ^ even), b)
        right = _remainder(right + _hash(left ^ odd), a)
    return left * np.uint64(a) + right


def _remainder(x: np.ndarray, divisor: int) -> np.ndarray:
    """x % divisor in a third of the time: numpy's division is vectorized, its remainder is not."""
    return x - x // np.uint64(divisor) * np.uint64(divisor)


def _hash(x: np.ndarray) -> np.ndarray:
    """63 bits for each of x, uint64 (m,), which is overwritten: splitmix64's mixing function, as core/seeds.py has it."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(1)  # so that the sum with a half does not overflow
    return x

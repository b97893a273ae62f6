"""Which samples a rank reads, as a pure function of the samples consumed.

The stream never ends: position p is in epoch p // dataset, and is sample permutation(seed, epoch, dataset)[p % dataset].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from hvdtrain.core.seeds import fold

Sampling = Literal["global", "partition"]


class Positions(NamedTuple):
    """Some samples of the stream, and the epoch of each: int64 (n,) both."""

    samples: np.ndarray
    epochs: np.ndarray

    def split(self, parts: int) -> list[Positions]:
        """As numpy.array_split does."""
        pairs = zip(np.array_split(self.samples, parts), np.array_split(self.epochs, parts), strict=True)
        return [Positions(*pair) for pair in pairs]


def places(start: int, count: int, rank: int, size: int, dataset: int, seed: int, sampling: Sampling = "global") -> Positions:
    """This rank's samples of the positions [start, start + count) of the stream. All ranks together read the same for any size.

    "global": rank r takes the r-th contiguous share of the positions, wherever they lie in the data set.
    "partition": each epoch's shuffle is dealt out like cards, so that during an epoch a rank reads its own part alone. A rank may get one
    sample more or less than another for each epoch that the positions touch.
    """
    assert start >= 0 and count >= 0 and 0 <= rank < size and dataset > 0, (start, count, rank, size, dataset)
    assert sampling in ("global", "partition"), sampling
    if sampling == "partition":
        parts = [  # the places from `first` on that were dealt to this rank
            (epoch, permutation(seed, epoch, dataset)[first + (rank - first) % size : last : size])
            for epoch, first, last in _epochs(start, start + count, dataset)
        ]
    else:
        low, high = share(count, rank, size)
        parts = [
            (epoch, permutation(seed, epoch, dataset)[first:last]) for epoch, first, last in _epochs(start + low, start + high, dataset)
        ]
    nothing = np.empty(0, np.int64)
    return Positions(
        np.concatenate([nothing, *(samples for _, samples in parts)]),
        np.concatenate([nothing, *(np.full(len(samples), epoch, np.int64) for epoch, samples in parts)]),
    )


def indices(start: int, count: int, rank: int, size: int, dataset: int, seed: int, sampling: Sampling = "global") -> np.ndarray:
    """The samples of places()."""
    return places(start, count, rank, size, dataset, seed, sampling).samples


def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """Bounds of rank's contiguous share of `count` things: shares differ by at most 1, and cover everything once."""
    return count * rank // size, count * (rank + 1) // size


def largest_share(start: int, count: int, size: int, dataset: int, sampling: Sampling = "global") -> int:
    """No rank's indices(start, count, ...) are more than this; the same number on every rank."""
    if sampling == "global":
        return -(-count // size)
    return sum(-(-(last - first) // size) for _, first, last in _epochs(start, start + count, dataset))


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, dataset: int) -> np.ndarray:
    """The order of one epoch, int64, read-only: 7 ms for 60,000 samples, then from memory. Equal for every version of numpy."""
    order = np.argsort(fold(seed, epoch, np.arange(dataset, dtype=np.uint64)), kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def _epochs(start: int, stop: int, dataset: int) -> Iterator[tuple[int, int, int]]:
    """(epoch, first place, last place + 1) for each epoch that the positions [start, stop) touch."""
    while start < stop:
        epoch, first = divmod(start, dataset)
        last = min(dataset, first + stop - start)
        yield epoch, first, last
        start += last - first

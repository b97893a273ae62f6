"""The order of a shuffle buffer: which sample of a stream comes at which position, by the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hvdtrain.core.progress import fold

_SLOTS = 0x736C6F7473  # a stream of counters
_CHUNK = 4096  # positions whose draws are computed together


class BufferOrder(NamedTuple):
    """A buffer of `size` samples: each position takes the sample of a random slot, and the next
    sample of the stream takes its place. At the end of an epoch the buffer is emptied.

    So an epoch has each of its samples once. A draw depends on seed, epoch and position only.
    """

    size: int  # slots; at most the samples of an epoch
    epoch_samples: int
    seed: int

    def slots(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Returns the slot that each position [first, last) of an epoch takes, int64."""
        positions = np.arange(first, last, dtype=np.int64)
        left = np.minimum(self.epoch_samples - positions, self.size)  # samples in the buffer
        draws = fold(fold(self.seed, _SLOTS, epoch), positions.astype(np.uint64))
        return (draws % left.astype(np.uint64)).astype(np.int64)

    def slots_from(self, epoch: int, position: int) -> Iterator[int]:
        """Yields the slots of an epoch from this position on."""
        for first in range(position, self.epoch_samples, _CHUNK):
            last = min(first + _CHUNK, self.epoch_samples)
            yield from self.slots(epoch, first, last).tolist()

    def contents(self, epoch: int, position: int) -> list[int]:
        """Returns the sample of the epoch in each slot before this position is taken. It looks back
        until it knows the last sample of each slot, about size x ln(size) positions."""
        refills = min(position, self.epoch_samples - self.size)
        refilled = np.full(self.size, -1, np.int64)  # the last position that took the slot
        last = refills
        while last and (refilled < 0).any():
            first = max(0, last - 4 * self.size)
            slots = self.slots(epoch, first, last)
            latest = np.full(self.size, -1, np.int64)
            np.maximum.at(latest, slots, np.arange(first, last, dtype=np.int64))
            refilled = np.where(refilled < 0, latest, refilled)
            last = first
        held: list[int] = np.where(
            refilled < 0, np.arange(self.size), refilled + self.size
        ).tolist()
        for slot in self.slots(epoch, refills, position).tolist():  # at the end of an epoch
            held[slot] = held[-1]
            held.pop()
        return held

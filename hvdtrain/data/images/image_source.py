"""Images that are decoded when they are read: a source of any size that keeps nothing."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdtrain.core.seeds import fold
from hvdtrain.data.images.decode import Where, decode
from hvdtrain.data.source import Source, channel_counts, stats_of

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_STATS_IMAGES = 2000
_STATS_VALUES = 2**28  # at most, so that large images do not hold up a start
_BLOCK_VALUES = 2**24  # read at once for them
_SMALL_BYTES = 2**12  # an image file of 100 x 100 pixels


class Encoded(Protocol):
    """Image files by their place in a data set, wherever they lie. Safe from several threads."""

    @property
    def where(self) -> str:
        """All of them, for messages."""

    def __len__(self) -> int: ...

    def content(self, place: int) -> bytes:
        """One file, or a UserError."""

    def name(self, place: int) -> str:
        """One file, for messages: it may have to be looked for."""


@dataclass(frozen=True, eq=False)
class Streamed:
    """A source that decodes each image whenever it is read, on the thread that reads."""

    encoded: Encoded
    y: np.ndarray  # int64 (n,), each in 0..classes-1
    classes: int
    shape: tuple[int, int, int]
    crop: bool  # to a centre square; else every image has to have the size of `first`
    first: Where
    turns: Lock = field(default_factory=Lock)

    def __len__(self) -> int:
        return len(self.encoded)

    def pixels(self, place: int) -> bytes:
        """(H, W, C), row by row."""
        return decode(self.encoded.content(place), partial(self.encoded.name, place), self.first, self.shape, self.crop)

    def read(self, indices: np.ndarray) -> Batch:
        check_range(indices, len(self))
        x = np.empty((len(indices), *self.shape), np.uint8)
        with self._turn(indices):
            for row, place in enumerate(indices.tolist()):
                x[row] = np.frombuffer(self.pixels(place), np.uint8).reshape(self.shape)
        return {"x": x, "y": self.y[indices]}

    def _turn(self, indices: np.ndarray) -> AbstractContextManager[object]:
        """Batches of small images are read one after the other: they are mostly Python, and two threads of it, which pass the interpreter
        to and fro at every file, read 0.56 times as many images of 32 x 32 as one; of 500 x 375, 1.65 times as many.
        """
        return self.turns if len(indices) > 0 and self.is_small(int(indices[0])) else nullcontext()

    def is_small(self, place: int) -> bool:
        """Whether decoding this image is mostly Python, so that one thread is as fast as many."""
        return len(self.encoded.content(place)) < _SMALL_BYTES

    def stats(self) -> tuple[np.ndarray, np.ndarray]:
        """Of at most 2,000 images: see sampled_stats()."""
        return sampled_stats(self)


def sampled_stats(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation as Source.stats() gives them, over a fixed part of the images: exact over that part, and equal on all ranks.

    At most 2,000 images, drawn by counters out of all; of large ones fewer: 2**28 values.
    """
    values, images = math.prod(source.shape), len(source)
    most, block = max(1, min(_STATS_IMAGES, _STATS_VALUES // values)), max(1, _BLOCK_VALUES // values)
    chosen = np.arange(images)
    if images > most:
        chosen = np.unique(fold(np.arange(most, dtype=np.uint64)) % np.uint64(images)).astype(np.int64)
    counts = np.zeros((source.shape[2], 256), np.int64)
    for start in range(0, len(chosen), block):
        counts += channel_counts(source.read(chosen[start : start + block])["x"])
    return stats_of(counts)


def check_range(indices: np.ndarray, samples: int) -> None:
    if len(indices) and not 0 <= indices.min() <= indices.max() < samples:
        raise IndexError(f"samples {indices.min()}..{indices.max()} of {samples}")

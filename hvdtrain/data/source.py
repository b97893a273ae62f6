"""Source: a data set as the trainer reads it, samples by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from hvdtrain.data.channel_stats import ChannelStats, channel_stats
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

Split = Literal["train", "val"]


class Source(Protocol):
    """Images and labels by index: no rank, no randomness, no framework."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every image."""

    @property
    def classes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch:
        """{"x": uint8 (n, H, W, C), "y": int64 (n,)} in fresh arrays. Safe to call from several threads.

        Raises UserError for a damaged sample.
        """

    def stats(self) -> ChannelStats:
        """Mean and standard deviation of x / 255: the same bits on all ranks."""


@dataclass(frozen=True, eq=False)
class ArraySource:
    """A source in memory, or in a memory-mapped file. Raises UserError where the arrays are not as described."""

    x: np.ndarray  # uint8 (n, H, W, C)
    y: np.ndarray  # int64 (n,), each in 0..classes-1
    classes: int
    where: str = ""  # a path or a name, for messages

    def __post_init__(self) -> None:
        if self.x.dtype != np.uint8 or self.x.ndim != 4 or 0 in self.x.shape:
            raise UserError(f"images are {_describe(self.x)}, expected uint8 (n, H, W, C) with no dimension 0", self.where)
        if self.y.dtype != np.int64 or self.y.shape != self.x.shape[:1]:
            raise UserError(f"labels are {_describe(self.y)}, expected int64 ({len(self.x)},), one for each image", self.where)
        wrong = np.flatnonzero((self.y < 0) | (self.y >= self.classes))
        if len(wrong):
            first = int(wrong[0])
            raise UserError(f"label {self.y[first]} of sample {first} is outside 0..{self.classes - 1}", self.where)

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.x.shape[1:]
        return height, width, channels

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: np.ndarray) -> Batch:
        return {"x": self.x[indices], "y": self.y[indices]}

    def stats(self) -> ChannelStats:
        """Exact over all samples; about 1 s for 200 million values."""
        return channel_stats(self.x)


def check_indices(indices: np.ndarray, samples: int) -> None:
    """Raises IndexError where an index is not in 0 ... samples - 1."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < samples:
        raise IndexError(f"samples {indices.min()}..{indices.max()} of {samples}")


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"

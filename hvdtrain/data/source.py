"""What the trainer asks of a data set: samples by index, and what they look like."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

Split = Literal["train", "val"]
_BLOCK_BYTES = 2**22  # of pixels counted at once: np.bincount takes eight times as much


class Source(Protocol):
    """Images and labels by index: no rank, no randomness, no framework."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every image."""

    @property
    def classes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch:
        """{"x": uint8 (n, H, W, C), "y": int64 (n,)}: fresh arrays, the caller's own. Safe from several threads."""

    def stats(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of x / 255 over the source, float64 (C,) each: bit-equal on all ranks, deviation never 0."""


@dataclass(frozen=True, eq=False)
class ArraySource:
    """A source in memory, or in a memory-mapped file."""

    x: np.ndarray  # uint8 (n, H, W, C)
    y: np.ndarray  # int64 (n,), each in 0..classes-1
    classes: int
    where: str = ""  # a path or a name, for messages

    def __post_init__(self) -> None:
        if self.x.dtype != np.uint8 or self.x.ndim != 4 or 0 in self.x.shape:
            raise UserError(f"images are {_kind(self.x)}, expected uint8 (n, H, W, C), none of them 0", self.where)
        if self.y.dtype != np.int64 or self.y.shape != self.x.shape[:1]:
            raise UserError(f"labels are {_kind(self.y)}, expected int64 ({len(self.x)},), one for each image", self.where)
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

    def stats(self) -> tuple[np.ndarray, np.ndarray]:
        """Exact: from integer sums over all samples, about 1 s for 200 million values."""
        return channel_stats(self.x)


def channel_stats(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of x / 255 for each channel of x, uint8 (n, H, W, C): float64 (C,) each, deviation 1 where constant."""
    return stats_of(channel_counts(x))


def channel_counts(x: np.ndarray) -> np.ndarray:
    """How often each channel of x, uint8 (n, H, W, C), has each value: int64 (C, 256). Counts of parts of a source add up."""
    channels = x.shape[3]
    counts = np.zeros((channels, 256), np.int64)
    samples = max(1, _BLOCK_BYTES // math.prod(x.shape[1:]))
    for start in range(0, len(x), samples):
        pixels = x[start : start + samples].reshape(-1, channels)  # (pixels, C)
        for channel in range(channels):
            counts[channel] += np.bincount(pixels[:, channel], minlength=256)
    return counts


def stats_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What channel_stats() tells, from counts (C, 256)."""
    pairs = [_moments(row) for row in counts.tolist()]
    return np.array([mean for mean, _ in pairs]), np.array([deviation for _, deviation in pairs])


def _moments(counts: list[int]) -> tuple[float, float]:
    """Mean and standard deviation from a histogram of 0..255, in integers until the last division: no order of sums can change them."""
    pixels = sum(counts)
    total = sum(value * count for value, count in enumerate(counts))
    squares = sum(value * value * count for value, count in enumerate(counts))
    spread = squares * pixels - total * total  # pixels^2 times the variance
    return total / (255 * pixels), math.sqrt(spread) / (255 * pixels) if spread else 1.0


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"

"""Mean and standard deviation of each channel of a data set or of a fixed part of it. The bits are
the same on every rank and in any order of samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hvdtrain.core.progress import fold

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_BLOCK_BYTES = 2**22  # of pixels counted at a time: np.bincount takes eight times as much memory


class ChannelStats(NamedTuple):
    """Mean and deviation of x / 255, float64 (C,) each."""

    mean: np.ndarray
    std: np.ndarray  # 1 if a channel is constant


def channel_stats(x: np.ndarray) -> ChannelStats:
    """Computes statistics over all of x, uint8 (n, H, W, C)."""
    return stats_of_counts(channel_counts(x))


def channel_counts(x: np.ndarray) -> np.ndarray:
    """Counts how often each channel of x, uint8 (n, H, W, C), has each value: int64 (C, 256).
    Counts of parts of a data set add up."""
    channels = x.shape[3]
    counts = np.zeros((channels, 256), np.int64)
    samples = max(1, _BLOCK_BYTES // math.prod(x.shape[1:]))
    for start in range(0, len(x), samples):
        pixels = x[start : start + samples].reshape(-1, channels)  # (pixels, C)
        for channel in range(channels):
            counts[channel] += np.bincount(pixels[:, channel], minlength=256)
    return counts


def stats_of_counts(counts: np.ndarray) -> ChannelStats:
    """Computes statistics from channel_counts(), int64 (C, 256)."""
    pairs = [_mean_and_std(histogram) for histogram in counts.tolist()]
    return ChannelStats(np.array([mean for mean, _ in pairs]), np.array([std for _, std in pairs]))


def _mean_and_std(counts: list[int]) -> tuple[float, float]:
    """Computes mean and deviation of x / 255 from a histogram of 0..255: in integers until the last
    division, so the order of sums does not matter."""
    pixels = sum(counts)
    total = sum(value * count for value, count in enumerate(counts))
    squares = sum(value * value * count for value, count in enumerate(counts))
    spread = squares * pixels - total * total  # pixels^2 times the variance
    return total / (255 * pixels), math.sqrt(spread) / (255 * pixels) if spread else 1.0


_IMAGES = 2000
_VALUES = 2**28  # at most, so that large images do not delay the start
_BLOCK_VALUES = 2**24  # read at once


class Images(Protocol):
    """The part of a source of images that statistics and codebooks use: it reads {"x": uint8 (n, H,
    W, C)}."""

    @property
    def shape(self) -> tuple[int, int, int]: ...
    def __len__(self) -> int: ...
    def read(self, indices: np.ndarray) -> Batch: ...


def sampled_stats(source: Images) -> ChannelStats:
    """Computes exact statistics over a fixed part of a source's images; they are equal on all
    ranks.

    Reads at most 2,000 images, drawn by counters, and at most 2**28 values: fewer images if they
    are large.
    """
    values = math.prod(source.shape)
    images = len(source)
    most = max(1, min(_IMAGES, _VALUES // values))
    chosen = np.arange(images)
    if images > most:
        chosen = np.unique(fold(np.arange(most, dtype=np.uint64)) % np.uint64(images)).astype(
            np.int64
        )
    return stats_of_images(source, chosen)


def stats_of_images(source: Images, indices: np.ndarray) -> ChannelStats:
    """Computes statistics over the images at `indices`, read in blocks of about 2**24 values."""
    block = max(1, _BLOCK_VALUES // math.prod(source.shape))
    counts = np.zeros((source.shape[2], 256), np.int64)
    for start in range(0, len(indices), block):
        counts += channel_counts(source.read(indices[start : start + block])["x"])
    return stats_of_counts(counts)

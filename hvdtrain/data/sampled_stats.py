"""Mean and standard deviation over a fixed part of a data set, for sources that are too large to be read whole."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.core.seeds import fold
from hvdtrain.data.channel_stats import ChannelStats, channel_counts, stats_of_counts
from hvdtrain.data.source import LabelledImages

_IMAGES = 2000
_VALUES = 2**28  # at most, so that large images do not delay the start
_BLOCK_VALUES = 2**24  # read at once


def sampled_stats(source: LabelledImages) -> ChannelStats:
    """Over a fixed part of the images of a source: exact over that part, and equal on all ranks.

    At most 2,000 images, drawn by counters; fewer of large ones, so that at most 2**28 values are read.
    """
    values, images = math.prod(source.shape), len(source)
    most = max(1, min(_IMAGES, _VALUES // values))
    chosen = np.arange(images)
    if images > most:
        chosen = np.unique(fold(np.arange(most, dtype=np.uint64)) % np.uint64(images)).astype(np.int64)
    return stats_of_images(source, chosen)


def stats_of_images(source: LabelledImages, indices: np.ndarray) -> ChannelStats:
    """Over the images at `indices`, read in blocks of about 2**24 values."""
    block = max(1, _BLOCK_VALUES // math.prod(source.shape))
    counts = np.zeros((source.shape[2], 256), np.int64)
    for start in range(0, len(indices), block):
        counts += channel_counts(source.read(indices[start : start + block])["x"])
    return stats_of_counts(counts)

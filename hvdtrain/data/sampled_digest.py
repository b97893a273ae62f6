"""A digest of some images of a data set, drawn by a seed: to compare ranks where reading all images takes long."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.core.digest import digest
from hvdtrain.core.seeds import fold
from hvdtrain.data.source import LabelledImages

_IMAGES = 64
_VALUES = 2**24  # at most: 0.1 s of large JPEG files
_DRAWN = 0x64726177  # a stream of counters apart from those of the sampler


def digest_of_some(source: LabelledImages, seed: int) -> str:
    """A digest of at most 64 images and their labels, fewer of large ones: drawn by counters, equal on all ranks."""
    most = max(1, min(_IMAGES, _VALUES // math.prod(source.shape)))
    drawn = fold(seed, _DRAWN, np.arange(most, dtype=np.uint64)) % np.uint64(len(source))
    batch = source.read(np.unique(drawn).astype(np.int64))
    return digest({"x": batch["x"], "y": batch["y"]})

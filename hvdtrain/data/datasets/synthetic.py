"""Images computed from counters, of any size and number. They need no files or memory, and their
classes can be learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.progress import fold
from hvdtrain.data.channel_stats import ChannelStats, stats_of_images
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.labels import digest_of_labels
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import LabelledImages, Split, check_indices

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_GRID = 4  # a class is a 4x4 pattern for each channel, enlarged to the image
_STATS_SAMPLES = 1024
_STATS_VALUES = 2**28  # at most: about 2 s
_MOST_SAMPLES = 2**40
_MOST_CLASSES = 2**20
_MOST_VALUES = 2**26  # of one image
_TRAIN, _VAL, _PATTERN = range(3)  # streams of counters


STAGING = Staging(has_files=False)


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    samples: int = 10000,
    val_samples: int = 1000,
    shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
) -> LabelledImages:
    """Images of one quarter class pattern and three quarters noise, computed at each read.

    samples: training images
    val_samples: validation images
    shape: height, width, channels of an image (pixels)
    classes: classes, equally frequent

    Raises UserError if data.root is set, and for a shape or number of classes that is
    impossible.
    """
    if root is not None:
        raise OptionError(
            "data.name=synthetic reads no folder",
            "root",
            "leave data.root out, or choose another data.name",
        )
    height, width, channels = shape
    _check_limit("samples", samples, _MOST_SAMPLES)
    _check_limit("val_samples", val_samples, _MOST_SAMPLES)
    _check_limit("classes", classes, _MOST_CLASSES)
    _check_limit("shape", min(height, width, channels), _MOST_VALUES)
    if height * width * channels > _MOST_VALUES:
        raise OptionError(
            f"images of {height * width * channels} values are too large, at most {_MOST_VALUES}",
            "shape",
        )
    stream, length = (_TRAIN, samples) if split == "train" else (_VAL, val_samples)
    return _Synthetic((height, width, channels), classes, length, stream)


def _check_limit(option: str, value: int, most: int) -> None:
    if value < 1:
        raise OptionError(f"{value} is too small, at least 1 is needed", option)
    if value > most:
        raise OptionError(f"{value} is too large, at most {most} is possible", option)


@dataclass(frozen=True)
class _Synthetic(LabelledImages):
    shape: tuple[int, int, int]
    classes: int
    length: int
    stream: int  # training and validation images have the same patterns but different noise

    @property
    def class_names(self) -> tuple[str, ...]:
        return ()

    def __len__(self) -> int:
        return self.length

    def labels(self) -> np.ndarray:
        return np.arange(self.length) % self.classes

    def read(self, indices: np.ndarray) -> Batch:
        """About 1 ms for 100 images of 32x32x3."""
        check_indices(indices, self.length)
        y = indices.astype(np.int64) % self.classes
        noise = self._noise(indices)
        return {"x": self._pattern(y) // 4 + (noise - noise // 4), "y": y}  # at most 63 + 192 = 255

    def stats(self) -> ChannelStats:
        """Computes exact statistics over the first 1024 samples, or over 2**28 values of large
        images. All samples have the same distribution."""
        samples = min(self.length, _STATS_SAMPLES, -(-_STATS_VALUES // math.prod(self.shape)))
        return stats_of_images(self, np.arange(samples))

    def label_digest(self) -> str:
        """Returns a digest of the parameters that determine all labels."""
        return digest_of_labels(np.array([self.classes, self.length]))

    def _pattern(self, y: np.ndarray) -> np.ndarray:
        """Returns the patterns of classes y, int64 (n,), as uint8 (n, H, W, C)."""
        height, width, channels = self.shape
        cells = np.arange(_GRID * _GRID * channels, dtype=np.uint64)
        grid = (
            (fold(_PATTERN, y.astype(np.uint64)[:, None], cells) >> 56)
            .astype(np.uint8)
            .reshape(-1, _GRID, _GRID, channels)
        )
        rows = np.arange(height) * _GRID // height
        columns = np.arange(width) * _GRID // width
        return grid[:, rows[:, None], columns]  # (n, H, W, C)

    def _noise(self, indices: np.ndarray) -> np.ndarray:
        """Returns random bytes for the samples, uint8 (n, H, W, C)."""
        values = math.prod(self.shape)
        counters = np.arange(-(-values // 8), dtype=np.uint64)
        # (n, counters), eight values each
        seeds = fold(self.stream, indices.astype(np.uint64)[:, None], counters)
        return seeds.astype("<u8").view(np.uint8)[:, :values].reshape(-1, *self.shape)

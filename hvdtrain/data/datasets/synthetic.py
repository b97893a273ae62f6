"""Images made from counters: any size, no files, no memory, and something to learn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.seeds import fold
from hvdtrain.data.source import Source, Split, channel_counts, stats_of
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_GRID = 4  # a class is a 4x4 pattern for each channel, enlarged to the image
_STATS_SAMPLES = 1024
_STATS_VALUES = 2**28  # at most: about 2 s
_BLOCK_VALUES = 2**24  # read at once for them: about 100 MB
_MOST_SAMPLES, _MOST_CLASSES, _MOST_VALUES = 2**40, 2**20, 2**26  # _VALUES: of one image
_TRAIN, _VAL, _PATTERN = range(3)  # streams of counters


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    samples: int = 10000,
    val_samples: int = 1000,
    shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
) -> Source:
    """A quarter class pattern, three quarters noise, made anew at each read.

    samples: training images
    val_samples: validation images
    shape: height, width, channels of an image (pixels)
    classes: classes, equally frequent
    """
    if root is not None:
        raise UserError("synthetic images are read from no folder", "data.root", "leave data.root out, or choose another data.name")
    height, width, channels = shape
    options = {"samples": (samples, _MOST_SAMPLES), "val_samples": (val_samples, _MOST_SAMPLES), "classes": (classes, _MOST_CLASSES)}
    options["shape"] = min(height, width, channels), _MOST_VALUES
    for option, (value, most) in options.items():
        if value < 1:
            raise UserError(f"{value} is too small, at least 1 is needed", f"data.{option}")
        if value > most:
            raise UserError(f"{value} is too large, at most {most} is possible", f"data.{option}")
    if height * width * channels > _MOST_VALUES:
        raise UserError(f"images of {height * width * channels} values are too large, at most {_MOST_VALUES}", "data.shape")
    stream, length = (_TRAIN, samples) if split == "train" else (_VAL, val_samples)
    return _Synthetic((height, width, channels), classes, length, stream)


@dataclass(frozen=True)
class _Synthetic:
    shape: tuple[int, int, int]
    classes: int
    length: int
    stream: int  # train and val: the same patterns under other noise

    def __len__(self) -> int:
        return self.length

    def read(self, indices: np.ndarray) -> Batch:
        """About 1 ms for 100 images of 32x32x3."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.length:
            raise IndexError(f"samples {indices.min()}..{indices.max()} of {self.length}")
        y = indices.astype(np.int64) % self.classes
        noise = self._noise(indices)
        return {"x": self._pattern(y) // 4 + (noise - noise // 4), "y": y}  # at most 63 + 192 = 255

    def stats(self) -> tuple[np.ndarray, np.ndarray]:
        """Exact over the first 1024 samples (or all, if fewer), which stand for the rest: they are alike by construction.

        Of large images fewer: 2**28 values.
        """
        values = math.prod(self.shape)
        samples, block = min(self.length, _STATS_SAMPLES, -(-_STATS_VALUES // values)), -(-_BLOCK_VALUES // values)
        parts = (self.read(np.arange(start, min(start + block, samples)))["x"] for start in range(0, samples, block))
        return stats_of(sum((channel_counts(x) for x in parts), np.zeros((self.shape[2], 256), np.int64)))

    def _pattern(self, y: np.ndarray) -> np.ndarray:
        height, width, channels = self.shape
        cells = np.arange(_GRID * _GRID * channels, dtype=np.uint64)
        grid = (fold(_PATTERN, y.astype(np.uint64)[:, None], cells) >> 56).astype(np.uint8).reshape(-1, _GRID, _GRID, channels)
        rows, columns = np.arange(height) * _GRID // height, np.arange(width) * _GRID // width
        return grid[:, rows[:, None], columns]  # (n, H, W, C)

    def _noise(self, indices: np.ndarray) -> np.ndarray:
        values = math.prod(self.shape)
        words = np.arange(-(-values // 8), dtype=np.uint64)
        seeds = fold(self.stream, indices.astype(np.uint64)[:, None], words)  # (n, words), eight values each
        return seeds.astype("<u8").view(np.uint8)[:, :values].reshape(-1, *self.shape)

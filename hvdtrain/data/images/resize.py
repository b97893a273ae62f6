"""Boxes of a batch of images brought to the images' own size: bilinear, in integers, so that every device gives the same bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ONE = 2**11  # the weight of a whole row or column: 8 + 11 + 11 bits fit into int32, and a result is at most 0.13 of 255 off
_BLOCK_NUMBERS = 2**16  # of int32 at once: they stay in the cache, and their memory is not asked of the system each time


class Lines(NamedTuple):
    """Of one axis: each of the P points of the result lies between two rows (or columns) of the image. All are (n, P)."""

    low: np.ndarray  # int64
    high: np.ndarray  # int64
    weight: np.ndarray  # int32 0 ... ONE, of `high`


def lines(start: np.ndarray, length: np.ndarray, points: int) -> Lines:
    """`length` rows from `start` on, int64 (n,) both, spread over `points`. A pixel's centre lies at its half."""
    at = (np.arange(points) + 0.5) * (length[:, None] / points) - 0.5
    at = at.clip(0)
    low = at.astype(np.int64)
    weight = np.rint((at - low) * ONE).astype(np.int32)
    return Lines(start[:, None] + low, start[:, None] + np.minimum(low + 1, length[:, None] - 1), weight)


def axes(box: np.ndarray, mirrored: np.ndarray | None, height: int, width: int) -> tuple[Lines, Lines]:
    """Down and across, for boxes int64 (n, 4) of top, left, height, width; what is mirrored, bool (n,), is read from right to left."""
    top, left, tall, wide = box.T
    across = lines(left, wide, width)
    if mirrored is not None:
        across = Lines(*(np.where(mirrored[:, None], each[:, ::-1], each) for each in across))
    return lines(top, tall, height), across


def resized(x: np.ndarray, box: np.ndarray, mirrored: np.ndarray | None = None) -> np.ndarray:
    """uint8 (n, H, W, C), contiguous -> the boxes of axes() in the images' size. No antialiasing."""
    n, height, width, channels = x.shape
    down, across = axes(box, mirrored, height, width)
    image = np.arange(n).repeat(height)  # (n H,): of each row of the result
    low, high = ((height * np.arange(n)[:, None] + of).ravel() for of in (down.low, down.high))
    weight, sideways = down.weight.reshape(-1, 1), across.weight.repeat(channels, 1)  # (n H, 1), (n, W C)
    whole, result = x.reshape(n * height, width * channels), np.empty((n * height, width * channels), np.uint8)
    each = max(1, _BLOCK_NUMBERS // (width * channels))
    for first in range(0, n * height, each):
        rows = slice(first, first + each)
        mixed = _between(whole.take(low[rows], 0), whole.take(high[rows], 0), weight[rows])
        of, start = image[rows], width * np.arange(len(image[rows]))[:, None]
        pixels = mixed.reshape(-1, channels)
        before, after = (pixels.take(start + side[of], 0).reshape(mixed.shape) for side in (across.low, across.high))
        total = _between(before, after, sideways[of])  # at most 255 x 2^22
        total += ONE * ONE // 2
        total >>= 22
        result[rows] = total
    return result.reshape(x.shape)


def _between(low: np.ndarray, high: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """ONE times the numbers between `low` and `high`, int32."""
    total = np.multiply(low, ONE - weight, dtype=np.int32)
    total += np.multiply(high, weight, dtype=np.int32)
    return total

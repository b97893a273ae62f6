"""Random resized crop: boxes of images resized to the images' size, bilinear in integers, so that every device gives the same bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WEIGHT_ONE = 2**11  # the weight 1: 8 + 11 + 11 bits fit into int32, and a result is at most 0.13 of 255 levels off
_BLOCK_NUMBERS = 2**16  # int32 numbers computed at once: they stay in the cache, and their memory is reused


class Interpolation(NamedTuple):
    """Along one axis: each of the P points of the result lies between two rows (or columns) of the image. Arrays of shape (n, P)."""

    low: np.ndarray  # int64, number of the row
    high: np.ndarray  # int64
    weight: np.ndarray  # int32, of `high`: 0 ... WEIGHT_ONE


def interpolate_axis(start: np.ndarray, length: np.ndarray, points: int) -> Interpolation:
    """`length` rows from `start` on, int64 (n,) both, resampled at `points` points. The centre of a pixel is at its half."""
    at = (np.arange(points) + 0.5) * (length[:, None] / points) - 0.5
    at = at.clip(0)
    low = at.astype(np.int64)
    weight = np.rint((at - low) * WEIGHT_ONE).astype(np.int32)
    high = np.minimum(low + 1, length[:, None] - 1)
    return Interpolation(start[:, None] + low, start[:, None] + high, weight)


def interpolate_box(box: np.ndarray, flipped: np.ndarray | None, height: int, width: int) -> tuple[Interpolation, Interpolation]:
    """Along the height and along the width, for boxes int64 (n, 4) of top, left, height, width; flipped is bool (n,), left to right."""
    top, left, tall, wide = box.T
    across = interpolate_axis(left, wide, width)
    if flipped is not None:
        across = Interpolation(*(np.where(flipped[:, None], each[:, ::-1], each) for each in across))
    return interpolate_axis(top, tall, height), across


def resized_crop(x: np.ndarray, box: np.ndarray, flipped: np.ndarray | None = None) -> np.ndarray:
    """uint8 (n, H, W, C), contiguous -> the box of each image, resized to H x W. No antialiasing. `box` and `flipped` as above."""
    n, height, width, channels = x.shape
    down, across = interpolate_box(box, flipped, height, width)
    image_of_row = np.arange(n).repeat(height)  # (n H,)
    first_row = height * np.arange(n)[:, None]
    low_rows, high_rows = (first_row + down.low).ravel(), (first_row + down.high).ravel()  # (n H,), of all images one below the other
    row_weight = down.weight.reshape(-1, 1)  # (n H, 1)
    column_weight = across.weight.repeat(channels, 1)  # (n, W C)
    source = x.reshape(n * height, width * channels)
    result = np.empty((n * height, width * channels), np.uint8)
    block = max(1, _BLOCK_NUMBERS // (width * channels))
    for first in range(0, n * height, block):
        rows = slice(first, first + block)
        lines = _between(source.take(low_rows[rows], 0), source.take(high_rows[rows], 0), row_weight[rows])  # (rows, W C)
        image = image_of_row[rows]
        start = width * np.arange(len(image))[:, None]
        pixels = lines.reshape(-1, channels)  # (rows W, C)
        left = pixels.take(start + across.low[image], 0).reshape(lines.shape)
        right = pixels.take(start + across.high[image], 0).reshape(lines.shape)
        total = _between(left, right, column_weight[image])  # at most 255 x 2^22
        total += WEIGHT_ONE * WEIGHT_ONE // 2
        total >>= 22
        result[rows] = total
    return result.reshape(x.shape)


def _between(low: np.ndarray, high: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """WEIGHT_ONE times the interpolation of `low` and `high`, int32."""
    total = np.multiply(low, WEIGHT_ONE - weight, dtype=np.int32)
    total += np.multiply(high, weight, dtype=np.int32)
    return total

"""Random resized crop: boxes drawn by counters, resized bilinearly in integers, so that every
device gives the same bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdtrain.core.progress import fold

_STREAM = (
    0xA063E470  # not used by the counters of shuffles, sample weights, dropout and gradient noise
)


def draw_keys(seed: int, epochs: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Returns a seed for each sample in its epoch, uint64 (n,); epochs, samples: int64 (n,)."""
    keys: np.ndarray = fold(seed, _STREAM, epochs.astype(np.uint64), samples.astype(np.uint64))
    return keys


def uniform(keys: np.ndarray, counters: range) -> np.ndarray:
    """Returns uniform numbers, float64 (n, counters), strictly between 0 and 1: (k + 1/2) / 2^52
    for 52 random bits k. keys: uint64 (n,)."""
    bits = fold(keys[:, None], np.array(counters, np.uint64))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def integers(uniform_numbers: np.ndarray, limit: int) -> np.ndarray:
    """Returns integers, int64 in 0 ... limit - 1; their probabilities are equal up to limit /
    2^52."""
    return (uniform_numbers * limit).astype(np.int64)


_TRIES = 10
_COUNTERS = range(16, 16 + 2 * _TRIES + 2)  # distinct from the counters in augment.py


def crop_boxes(
    keys: np.ndarray, smallest: float, height: int | np.ndarray, width: int | np.ndarray
) -> np.ndarray:
    """Draws boxes with the distribution of torchvision's RandomResizedCrop, int64 (n, 4): top,
    left, height, width.

    keys: from draw_keys(), uint64 (n,). smallest: share of the area. height, width: a number for
    all images, or int64 (n,). The area is uniform from `smallest` to 1 of the image, the aspect
    ratio log-uniform from 3/4 to 4/3. The first of ten draws that fits into the image is used; if
    none fits, the largest centred box with an allowed ratio.
    """
    drawn = uniform(keys, _COUNTERS)
    height = np.broadcast_to(height, len(keys))
    width = np.broadcast_to(width, len(keys))
    area = (height * width)[:, None] * (smallest + (1 - smallest) * drawn[:, :_TRIES])
    ratio = np.exp(np.log(4 / 3) * (2 * drawn[:, _TRIES : 2 * _TRIES] - 1))
    tall = np.rint(np.sqrt(area / ratio)).astype(np.int64)  # (n, tries)
    wide = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    fits = (tall > 0) & (tall <= height[:, None]) & (wide > 0) & (wide <= width[:, None])
    any_fits = fits.any(1)[:, None]
    first = (np.arange(len(fits)), fits.argmax(1))
    centred = np.minimum(height, np.rint(width * 4 / 3)), np.minimum(width, np.rint(height * 4 / 3))
    sides = np.where(
        any_fits, np.stack([tall[first], wide[first]], 1), np.stack(centred, 1).astype(np.int64)
    )
    margin = np.stack([height, width], 1) - sides
    corner = np.where(
        any_fits, (drawn[:, 2 * _TRIES :] * (margin + 1)).astype(np.int64), margin // 2
    )
    return np.concatenate([corner, sides], 1)


# the weight 1: 8 + 11 + 11 bits fit into int32, and the error is at most 0.13 of 255 levels
WEIGHT_ONE = 2**11
# int32 numbers computed at a time: they stay in the cache, and their memory is reused
_BLOCK_NUMBERS = 2**16


class Interpolation(NamedTuple):
    """Interpolation along one axis: each of P result points lies between two rows (or columns) of
    the image. Arrays have shape (n, P)."""

    low: np.ndarray  # int64, index of the row
    high: np.ndarray  # int64
    weight: np.ndarray  # int32, weight of `high`: 0 ... WEIGHT_ONE


def interpolate_axis(start: np.ndarray, length: np.ndarray, points: int) -> Interpolation:
    """Resamples `length` rows from `start` on, int64 (n,) both, at `points` points. The centre of
    pixel i is at i + 1/2."""
    at = (np.arange(points) + 0.5) * (length[:, None] / points) - 0.5
    at = at.clip(0)
    low = at.astype(np.int64)
    weight = np.rint((at - low) * WEIGHT_ONE).astype(np.int32)
    high = np.minimum(low + 1, length[:, None] - 1)
    return Interpolation(start[:, None] + low, start[:, None] + high, weight)


def interpolate_box(
    box: np.ndarray, flipped: np.ndarray | None, height: int, width: int
) -> tuple[Interpolation, Interpolation]:
    """Returns the interpolation along the height and along the width, for boxes int64 (n, 4) of
    top, left, height, width. flipped: bool (n,), left to right."""
    top, left, tall, wide = box.T
    across = interpolate_axis(left, wide, width)
    if flipped is not None:
        across = Interpolation(
            *(np.where(flipped[:, None], each[:, ::-1], each) for each in across)
        )
    return interpolate_axis(top, tall, height), across


def resized_crop(x: np.ndarray, box: np.ndarray, flipped: np.ndarray | None = None) -> np.ndarray:
    """Resizes a box of each image to H x W, without antialiasing. x: contiguous uint8 (n, H, W, C).
    `box` and `flipped` are as in interpolate_box()."""
    n, height, width, channels = x.shape
    down, across = interpolate_box(box, flipped, height, width)
    image_of_row = np.arange(n).repeat(height)  # (n H,)
    first_row = height * np.arange(n)[:, None]
    # (n H,), of all images one below the other
    low_rows = (first_row + down.low).ravel()
    high_rows = (first_row + down.high).ravel()
    row_weight = down.weight.reshape(-1, 1)  # (n H, 1)
    column_weight = across.weight.repeat(channels, 1)  # (n, W C)
    source = x.reshape(n * height, width * channels)
    result = np.empty((n * height, width * channels), np.uint8)
    block = max(1, _BLOCK_NUMBERS // (width * channels))
    for first in range(0, n * height, block):
        rows = slice(first, first + block)
        # (rows, W C)
        lines = _between(
            source.take(low_rows[rows], 0), source.take(high_rows[rows], 0), row_weight[rows]
        )
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
    """Returns WEIGHT_ONE times the interpolation of `low` and `high`, int32."""
    total = np.multiply(low, WEIGHT_ONE - weight, dtype=np.int32)
    total += np.multiply(high, weight, dtype=np.int32)
    return total

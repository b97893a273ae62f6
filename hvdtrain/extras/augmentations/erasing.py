"""Random erasing (Zhong 2017, arXiv:1708.04896): a box of random pixels, drawn by counters."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.progress import fold
from hvdtrain.data.images.resized_crop import uniform

_TRIES = 10
# distinct from the counters in augment.py, random_operations.py and resized_crop.py
_COUNTERS = range(104, 104 + 2 * _TRIES + 3)
_PIXELS = 160  # the first counter of the random pixels
_AREA = 0.02, 0.33  # share of the image
_RATIO = np.log(0.3), np.log(3.3)


def erase_boxes(keys: np.ndarray, probability: float, height: int, width: int) -> np.ndarray:
    """Draws boxes with the distribution of torchvision's RandomErasing, int64 (n, 4): top, bottom,
    left, right; zeros if nothing is erased.

    keys: draw_keys(), uint64 (n,). The area is uniform and the aspect ratio log-uniform. The first
    of ten draws that is smaller than the image is used; if none is smaller, there is no box. The
    paper uses areas up to 0.4 and uniform ratios from 0.3 to 1 / 0.3.
    """
    drawn = uniform(keys, _COUNTERS)
    area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * drawn[:, :_TRIES])
    ratio = np.exp(_RATIO[0] + (_RATIO[1] - _RATIO[0]) * drawn[:, _TRIES : 2 * _TRIES])
    # (n, tries)
    tall = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    wide = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (tall < height) & (wide < width)
    first = np.arange(len(fits)), fits.argmax(1)
    sides = np.stack([tall[first], wide[first]], 1)
    corner = (
        drawn[:, 2 * _TRIES : 2 * _TRIES + 2] * (np.array([height, width]) - sides + 1)
    ).astype(np.int64)
    boxes = np.stack([corner, corner + sides], 2).reshape(-1, 4)
    return np.where((fits.any(1) & (drawn[:, -1] < probability))[:, None], boxes, 0)


def has_box(boxes: np.ndarray) -> np.ndarray:
    """Returns the indices of the boxes (n, 4) that contain a pixel, int64."""
    return np.flatnonzero((boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2]))


def random_pixels(keys: np.ndarray, height: int, width: int, channels: int) -> np.ndarray:
    """Returns boxes of random values, uint8 (n, H, W, C), each value with equal probability. keys:
    uint64 (n,)."""
    size = height * width * channels
    words = fold(keys[:, None], _PIXELS, np.arange(-(-size // 8), dtype=np.uint64))
    pixels: np.ndarray = words.astype("<u8").view(np.uint8)[:, :size]
    return pixels.reshape(len(keys), height, width, channels)

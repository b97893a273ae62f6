"""A picture of several images side by side."""

from __future__ import annotations

import math

import numpy as np

_GAP = 2  # pixels between two images, after they were enlarged
_SMALLEST = 64  # pixels of an image's height in the grid


def grid(images: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Arranges images uint8 (n, H, W, C) in a grid uint8 (rows, columns, C), enlarged by an integer
    factor, on white.

    columns: images side by side; None: as many as make the page about as high as wide.
    """
    n, height, width, channels = images.shape
    factor = max(1, -(-_SMALLEST // height))
    images = images.repeat(factor, 1).repeat(factor, 2)
    height = height * factor
    width = width * factor
    columns = min(n, columns or max(1, round(math.sqrt(n * height / width))))
    rows = -(-n // columns)
    page = np.full(
        (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), 255, np.uint8
    )
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top = row * (height + _GAP)
        left = column * (width + _GAP)
        page[top : top + height, left : left + width] = image
    return page

"""Images side by side, as a PNG."""

from __future__ import annotations

import io
import math

import numpy as np

_GAP = 2  # pixels between two images, after they were enlarged
_SMALLEST = 64  # pixels of an image's height in the grid


def grid(images: np.ndarray, columns: int | None = None) -> np.ndarray:
    """uint8 (n, H, W, C) -> uint8 (rows, columns, C): enlarged by a whole number, on white.

    columns: images side by side; None: as many as make the page about as high as wide.
    """
    n, height, width, channels = images.shape
    factor = max(1, -(-_SMALLEST // height))
    images = images.repeat(factor, 1).repeat(factor, 2)
    height, width = height * factor, width * factor
    columns = min(n, columns or max(1, round(math.sqrt(n * height / width))))
    rows = -(-n // columns)
    page = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), 255, np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top, left = row * (height + _GAP), column * (width + _GAP)
        page[top : top + height, left : left + width] = image
    return page


def png(page: np.ndarray) -> bytes:
    """The file of uint8 (H, W, C), of one channel or three."""
    import PIL.Image

    out = io.BytesIO()
    PIL.Image.fromarray(page[..., 0] if page.shape[2] == 1 else page).save(out, "PNG")
    return out.getvalue()

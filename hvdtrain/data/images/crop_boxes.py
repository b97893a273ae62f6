"""Which part of an image a random resized crop takes, as a pure function of (seed, epoch, sample) and the image's height and width."""

from __future__ import annotations

import numpy as np

from hvdtrain.data.images.draws import uniform

_TRIES = 10
_COUNTERS = range(16, 16 + 2 * _TRIES + 2)  # of draws.py, apart from those in augment.py


def crop_boxes(keys: np.ndarray, smallest: float, height: int | np.ndarray, width: int | np.ndarray) -> np.ndarray:
    """Boxes distributed as those of torchvision's RandomResizedCrop, int64 (n, 4): top, left, height, width.

    keys: draw_keys(), uint64 (n,). smallest: share of the area. height, width: of all images, or of each, int64 (n,).
    The area is uniform from `smallest` of the image to all of it, the aspect ratio log-uniform from 3/4 to 4/3. The first of ten tries that
    fits into the image counts; where none does, the largest centred box of an allowed ratio.
    """
    drawn = uniform(keys, _COUNTERS)
    height, width = np.broadcast_to(height, len(keys)), np.broadcast_to(width, len(keys))
    area = (height * width)[:, None] * (smallest + (1 - smallest) * drawn[:, :_TRIES])
    ratio = np.exp(np.log(4 / 3) * (2 * drawn[:, _TRIES : 2 * _TRIES] - 1))
    tall = np.rint(np.sqrt(area / ratio)).astype(np.int64)  # (n, tries)
    wide = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    fits = (tall > 0) & (tall <= height[:, None]) & (wide > 0) & (wide <= width[:, None])
    any_fits = fits.any(1)[:, None]
    first = (np.arange(len(fits)), fits.argmax(1))
    centred = np.minimum(height, np.rint(width * 4 / 3)), np.minimum(width, np.rint(height * 4 / 3))
    sides = np.where(any_fits, np.stack([tall[first], wide[first]], 1), np.stack(centred, 1).astype(np.int64))
    margin = np.stack([height, width], 1) - sides
    corner = np.where(any_fits, (drawn[:, 2 * _TRIES :] * (margin + 1)).astype(np.int64), margin // 2)
    return np.concatenate([corner, sides], 1)

"""Draws the operations of RandAugment and colour jitter for an image, by counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.data.images.resized_crop import integers, uniform
from hvdtrain.extras.augmentations.operations import Operation, is_geometric

MOST_OPERATIONS = 16  # RandAugment operations for an image; it has counters for 16
MAGNITUDES = 30  # the largest one; RandAugment's scale begins at 0
# distinct from the counters in augment.py, erasing.py and resized_crop.py
_RAND_AUGMENT = range(64, 64 + 2 * MOST_OPERATIONS)
_FACTORS = range(96, 100)
_ORDER = range(100, 104)
_FARTHEST = 150 / 331  # shift at the largest magnitude, as a share of the image's side
_OF_RAND_AUGMENT = [operation for operation in Operation if operation != Operation.HUE]
# in the order of augment.color_jitter
_JITTERED = (
    Operation.BRIGHTNESS,
    Operation.CONTRAST,
    Operation.COLOR,
    Operation.HUE,
)


def rand_augment(
    keys: np.ndarray, count: int, magnitude: int, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws RandAugment for images with keys uint64 (n,): operations int64 (n, count), in the order
    of application, and their arguments float64 (n, count).

    Each operation is one of 14 with equal probability and has a random direction (Cubuk 2020,
    arXiv:1909.13719). Magnitudes are torchvision's: 30 is a shear of 0.3, a rotation of 30 degrees,
    a move by 150 of 331 parts of the side, a factor of 0.1 or 1.9.
    """
    drawn = uniform(keys, _RAND_AUGMENT[: 2 * count])
    operations = integers(drawn[:, ::2], len(_OF_RAND_AUGMENT))
    sizes = _sizes(magnitude, height, width)[operations]
    is_factor = (operations >= int(Operation.BRIGHTNESS)) & (operations <= int(Operation.SHARPNESS))
    signed = (is_geometric(operations) | is_factor) & (drawn[:, 1::2] < 0.5)
    sizes = np.where(signed, -sizes, sizes)
    return operations, np.where(is_factor, 1 + sizes, sizes)


def _sizes(magnitude: int, height: int, width: int) -> np.ndarray:
    """Returns the magnitude of each operation, without sign; factors as their difference to 1."""
    part = magnitude / MAGNITUDES
    sizes = {
        Operation.SHEAR_X: 0.3 * part,
        Operation.SHEAR_Y: 0.3 * part,
        Operation.TRANSLATE_X: _FARTHEST * width * part,
        Operation.TRANSLATE_Y: _FARTHEST * height * part,
        Operation.ROTATE: 30.0 * part,
        Operation.POSTERIZE: round(8 - 4 * part),
        Operation.SOLARIZE: 255 * (MAGNITUDES - magnitude) / MAGNITUDES,
    }
    factors = dict.fromkeys(
        (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS), 0.9 * part
    )
    return np.array([(sizes | factors).get(operation, 0.0) for operation in _OF_RAND_AUGMENT])


def color_jitter(keys: np.ndarray, widths: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Draws torchvision's ColorJitter: operations int64 (n, k) and arguments float64 (n, k) for
    images with keys uint64 (n,), in a random order.

    widths: up to four numbers, for brightness, contrast, saturation and hue. The first three are
    factors, uniform from max(0, 1 - width) to 1 + width; hue is uniform from -width to width. A 0
    switches one off.
    """
    used = [place for place, width in enumerate(widths) if width]
    low = np.array(
        [max(0.0, 1 - width) for width in widths[:3]] + [-width for width in widths[3:]]
    )[used]
    high = np.array([1 + width for width in widths[:3]] + list(widths[3:]))[used]
    factors = low + (high - low) * uniform(keys, _FACTORS)[:, used]
    order = uniform(keys, _ORDER)[:, used].argsort(1)
    return np.array(_JITTERED, np.int64)[used][order], np.take_along_axis(factors, order, 1)

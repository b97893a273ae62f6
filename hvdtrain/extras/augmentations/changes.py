"""RandAugment, color jitter and erasing on images in host memory: what they need, their random
parameters, and their effect."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.data.images.augment import AugmentationParameters
from hvdtrain.data.images.mixing import paste
from hvdtrain.errors import UserError
from hvdtrain.extras.augmentations.erasing import erase_boxes, has_box, random_pixels
from hvdtrain.extras.augmentations.operations import (
    HostArrays,
    apply_operations,
    is_geometric,
    moved_pixels,
)
from hvdtrain.extras.augmentations.random_operations import color_jitter, rand_augment


def check_channels(augment: AugmentConfig, channels: int) -> None:
    """Raises UserError for images without the colours that an augmentation changes."""
    if augment.rand_augment:
        changes = "rand_augment"
    elif any(augment.color_jitter[1:]):
        changes = "color_jitter"
    else:
        changes = ""
    if changes and channels not in (1, 3):
        what = (
            f"augment.{changes} converts images to grey, which needs 1 or 3 channels; these have "
            f"{channels}"
        )
        fix = (
            f"leave augment.{changes} out; brightness, augment.erase and augment.cutmix support "
            "any number of channels"
        )
        raise UserError(what, augment.where(changes), fix)
    if channels == 1 and any(augment.color_jitter[2:]):
        what = "augment.color_jitter sets saturation or hue, which images of 1 channel do not have"
        shown = ",".join(f"{width:g}" for width in augment.color_jitter[:2])
        raise UserError(
            what,
            augment.where("color_jitter"),
            f"augment.color_jitter=[{shown}]: brightness and contrast",
        )


def draw(
    augment: AugmentConfig, keys: np.ndarray, height: int, width: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Draws AugmentationParameters.operation, argument, erase_box and erase_key. keys: draw_keys(),
    uint64 (n,)."""
    operation, argument = _operations(augment, keys, height, width)
    if not augment.erase:
        return operation, argument, None, None
    return operation, argument, erase_boxes(keys, augment.erase, height, width), keys


def _operations(
    augment: AugmentConfig, keys: np.ndarray, height: int, width: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Draws AugmentationParameters.operation and argument."""
    drawn = []
    if augment.rand_augment:
        drawn.append(rand_augment(keys, augment.rand_augment, augment.magnitude, height, width))
    if any(augment.color_jitter):
        drawn.append(color_jitter(keys, augment.color_jitter))
    if not drawn:
        return None, None
    operations, arguments = zip(*drawn, strict=True)
    return np.concatenate(operations, 1), np.concatenate(arguments, 1)


def apply(x: np.ndarray, parameters: AugmentationParameters) -> np.ndarray:
    """Applies operations, then erases boxes, in uint8 (n, H, W, C). `x` is not changed."""
    if parameters.operation is not None and parameters.argument is not None:
        x = apply_operations(x, parameters.operation, parameters.argument, HostArrays())
    if parameters.erase_box is not None and parameters.erase_key is not None:
        x = _erase(x, parameters.erase_box, parameters.erase_key)
    return x


def _erase(x: np.ndarray, boxes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    rows = has_box(boxes)
    result = x.copy()
    result[rows] = paste(x[rows], random_pixels(keys[rows], *x.shape[1:]), boxes[rows])
    return result


def apply_on_device(pixels: Any, parameters: AugmentationParameters) -> Any:
    """Does what apply() does, in contiguous tensors of torch (n, H, W, C) on any device."""
    from hvdtrain.extras.augmentations import on_device

    return on_device.apply(pixels, parameters)


def moved_places(
    operation: np.ndarray, argument: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the indices of the images that an operation (n,) moves, int64 (m,), and the row and
    the column that each of their pixels comes from, int32 (m, H, W); they may be outside."""
    of_images = np.flatnonzero(is_geometric(operation))
    found = moved_pixels(operation[of_images], argument[of_images], height, width, HostArrays())
    return of_images, *found

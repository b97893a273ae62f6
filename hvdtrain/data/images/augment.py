"""Augmentation of training images: its random parameters, and their effect on a batch.

The parameters of a sample are a pure function of (seed, epoch, sample): they depend neither on the
ranks nor on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.images.mixing import blend_weights, draw_mixtures, mix
from hvdtrain.data.images.resized_crop import crop_boxes, draw_keys, integers, resized_crop, uniform
from hvdtrain.errors import UserError

# Each parameter has its own counters, so that switching one augmentation on does not change the
# parameters of another. Other files use more counters: 5 to 7 and 40 to 44: mixing.py; 16 to 37:
# resized_crop.py; 64 to 103: the random_operations.py of an extra; 104 to 126 and 160: its
# erasing.py. The first that is free is 161.
_SHIFT = range(0, 2)
_FLIP = range(2, 3)
_CUTOUT = range(3, 5)


class AugmentationParameters(NamedTuple):
    """Parameters for n images, in the order of application; None if an augmentation is off. Only
    one of the first three is set."""

    crop_box: np.ndarray | None = (
        # int64 (n, 4): top, left, height, width of the box that is resized to the image's size
        None
    )
    shift: np.ndarray | None = (
        # int64 (n, 2), shift down and right of a window of the image's size; black outside of the
        # image
        None
    )
    reflected_shift: np.ndarray | None = (
        None  # the same, with the image mirrored at its border pixels
    )
    flipped: np.ndarray | None = None  # bool (n,), left to right
    operation: np.ndarray | None = (
        None  # int64 (n, k), numbers of Operation, from RandAugment and then colour jitter
    )
    argument: np.ndarray | None = None  # float64 (n, k), of the operations
    erase_box: np.ndarray | None = (
        # int64 (n, 4): top, bottom, left, right of the box of random pixels; 0, 0, 0, 0 without one
        None
    )
    erase_key: np.ndarray | None = None  # uint64 (n,), seeds of the random pixels
    cutout_box: np.ndarray | None = (
        None  # int64 (n, 4): top, bottom, left, right of the black box, clipped at the border
    )
    cutmix_box: np.ndarray | None = (
        None  # int64 (n, 4), box of the partner's pixels; empty if mixup was drawn
    )
    mixup_weight: np.ndarray | None = (
        # float64 (n,), weight of the image's own label: lambda of Zhang 2017, and of Yun 2019 after
        # clipping
        None
    )

    @property
    def has_changes(self) -> bool:
        """Whether there are operations or boxes of random pixels, which an extra applies."""
        return self.operation is not None or self.erase_box is not None


CHANGES = "augment.rand_augment"  # one of the keys that the same module implements
_NO_CHANGES = (None, None, None, None)  # operation, argument, erase_box, erase_key


def check_augmentation(augment: AugmentConfig, shape: tuple[int, int, int]) -> None:
    """Raises UserError if an image of `shape`, (H, W, C), might become all black, or if it has no
    colours to change."""
    height, width, channels = shape
    if changing := changing_key(augment):
        implementing_module(changing).check_channels(augment, channels)
    images = f"images of {height} x {width} pixels"
    if augment.crop >= min(height, width):
        what = f"augment.crop={augment.crop} may leave nothing of {images}"
        raise UserError(what, augment.where("crop"), f"less than {min(height, width)}")
    if augment.cutout >= max(height, width):
        what = f"augment.cutout={augment.cutout} may black out all of {images}"
        raise UserError(what, augment.where("cutout"), f"less than {max(height, width)}")


def changing_key(augment: AugmentConfig) -> str:
    """Returns the first key that is on and changes colours, erases boxes or applies RandAugment,
    which an extra does; empty if there is none."""
    keys = {
        "rand_augment": augment.rand_augment,
        "color_jitter": any(augment.color_jitter),
        "erase": augment.erase,
    }
    return next((f"augment.{name}" for name, is_on in keys.items() if is_on), "")


def draw(
    augment: AugmentConfig,
    seed: int,
    epochs: np.ndarray,
    samples: np.ndarray,
    shape: tuple[int, int, int],
) -> AugmentationParameters:
    """Draws the parameters for `samples` in their `epochs`, int64 (n,) both; images have `shape`
    (H, W, C)."""
    height, width, _ = shape
    keys = draw_keys(seed, epochs, samples)
    crop_box = shift = reflected_shift = flipped = cutout_box = None
    if augment.resized_crop:
        crop_box = crop_boxes(keys, augment.resized_crop, height, width)
    elif augment.crop:
        shift = integers(uniform(keys, _SHIFT), 2 * augment.crop + 1) - augment.crop
        if augment.pad == "reflect":
            shift, reflected_shift = None, shift
    if augment.flip == "alternating":
        flipped = (uniform(draw_keys(seed, np.zeros_like(epochs), samples), _FLIP)[:, 0] < 0.5) ^ (
            epochs % 2 == 1
        )
    elif augment.flip:
        flipped = uniform(keys, _FLIP)[:, 0] < 0.5
    if augment.cutout:
        cutout_box = _cutout_boxes(uniform(keys, _CUTOUT), augment.cutout, height, width)
    places = crop_box, shift, reflected_shift, flipped
    changes = _NO_CHANGES
    if changing := changing_key(augment):
        changes = implementing_module(changing).draw(augment, keys, height, width)
    mixtures = draw_mixtures(augment, keys, height, width)
    return AugmentationParameters(*places, *changes, cutout_box, *mixtures)


def augment_batch(batch: Batch) -> Batch:
    """Applies "augmentation" to "x" and "partner_augmentation" to "partner_x", then mixes both by
    "mixup_weight" and "cutmix_box".

    The result lacks "augmentation", "partner_x", "partner_augmentation" and "cutmix_box".
    """
    return augment_batch_with(apply, mix, batch)


_CONSUMED = ("augmentation", "partner_x", "partner_augmentation", "cutmix_box")


def augment_batch_with(
    apply_to: Callable[[Any, AugmentationParameters], Any],
    mix_both: Callable[[Any, Any, Any, Any], Any],
    batch: Batch,
) -> Batch:
    """Runs augment_batch() with the apply() and mix() of a framework."""
    augmented = {key: value for key, value in batch.items() if key not in _CONSUMED}
    if batch.get("augmentation") is not None:
        augmented["x"] = apply_to(batch["x"], batch["augmentation"])
    if "partner_x" in batch:
        partner = batch["partner_x"]
        if batch.get("partner_augmentation") is not None:
            partner = apply_to(partner, batch["partner_augmentation"])
        boxes = batch.get("cutmix_box")
        augmented["x"] = mix_both(
            augmented["x"], partner, blend_weights(batch.get("mixup_weight"), boxes), boxes
        )
    return augmented


def apply(x: np.ndarray, parameters: AugmentationParameters) -> np.ndarray:
    """Augments uint8 (n, H, W, C) by everything except mixup and CutMix. `x` is not changed."""
    x = np.ascontiguousarray(x)
    if parameters.crop_box is not None:
        x = resized_crop(x, parameters.crop_box, parameters.flipped)
    else:
        x = x if parameters.shift is None else _shift(x, parameters.shift)
        x = (
            x
            if parameters.reflected_shift is None
            else _shift(x, parameters.reflected_shift, reflects=True)
        )
        x = x if parameters.flipped is None else _flip(x, parameters.flipped)
    if parameters.has_changes:
        x = implementing_module(CHANGES).apply(x, parameters)
    return x if parameters.cutout_box is None else _cutout(x, parameters.cutout_box)


def _shift(x: np.ndarray, shift: np.ndarray, reflects: bool = False) -> np.ndarray:
    n, height, width, _ = x.shape
    border = int(np.abs(shift).max(initial=0))
    around = (0, 0), (border, border), (border, border), (0, 0)
    padded = np.pad(x, around, mode="reflect") if reflects else np.pad(x, around)
    # (n, 2 border + 1, 2 border + 1, C, H, W)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    return np.ascontiguousarray(
        np.moveaxis(windows, 3, -1)[np.arange(n), border + shift[:, 0], border + shift[:, 1]]
    )


def _flip(x: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    n, height, width, channels = x.shape
    result = x.copy()
    # (n, H, W): whole pixels move twice as fast as bytes
    pixels = result.reshape(n, height, width * channels).view(f"V{channels}")
    pixels[flipped] = pixels[flipped][:, :, ::-1]
    return result


def _cutout(x: np.ndarray, box: np.ndarray) -> np.ndarray:
    _, height, width, channels = x.shape
    top, bottom, left, right = (edge[:, None] for edge in box.T)
    rows = np.arange(height)
    columns = np.arange(width * channels) // channels
    # (n, H, W C)
    black = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[
        :, None
    ]
    return (x.reshape(black.shape) * ~black).reshape(x.shape)


def _cutout_boxes(drawn: np.ndarray, side: int, height: int, width: int) -> np.ndarray:
    """Returns squares that are centred on any pixel and clipped at the border (DeVries 2017,
    section 3.2).

    The authors' square has 2 (side // 2) pixels and is 0 after normalization, the mean colour. Here
    it has `side` pixels and is black.
    """
    centre = (drawn * (height, width)).astype(np.int64)
    first = centre - side // 2  # (n, 2)
    return (
        np.stack([first, first + side], axis=2)
        .clip(0, np.array([[height], [width]]))
        .reshape(-1, 4)
    )

"""Masks that are augmented with their images: they get the same crop, shift, flip and RandAugment,
with the nearest pixel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.images.augment import CHANGES, AugmentationParameters, draw
from hvdtrain.data.images.resized_crop import WEIGHT_ONE, interpolate_box
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


def moves_pixels(augment: AugmentConfig) -> bool:
    """Whether an augmentation moves pixels."""
    return bool(augment.crop or augment.resized_crop or augment.flip or augment.rand_augment)


@dataclass(frozen=True, eq=False)
class MovedMasks(AroundSource):
    """A source whose training masks get the same geometric augmentation as the image x of the
    sample."""

    source: Source
    # integer fields (n, H, W), and the label of pixels outside of the image
    masks: Mapping[str, int]
    augment: AugmentConfig

    @property
    def moved_masks(self) -> tuple[str, ...]:
        return tuple(self.masks)

    def read(self, indices: np.ndarray) -> Batch:
        return self.source.read(indices)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        batch = self.source.read_in_epochs(indices, epochs, seed)
        height, width, channels = self.source.fields["x"].shape
        parameters = draw(self.augment, seed, epochs, indices, (height, width, channels))
        return {
            **batch,
            **{
                name: move(batch[name], parameters, outside) for name, outside in self.masks.items()
            },
        }


def with_moved_masks(
    source: Source, masks: Mapping[str, int | None], augment: AugmentConfig
) -> Source:
    """Returns the source with masks that move with their images. Raises UserError if there is no
    label for pixels outside of the image."""
    if not masks or not (moves_pixels(augment) or augment.cutmix):
        return source
    key = "crop" if augment.crop and augment.pad == "zeros" else "rand_augment"
    if getattr(augment, key) and None in masks.values():
        what = (
            f"augment.{key}={getattr(augment, key)} fills in black pixels from outside the image, "
            "which have no class"
        )
        instead = "augment.pad=reflect" if key == "crop" else "augment.rand_augment=0"
        raise UserError(
            what, augment.where(key), f"task.ignore_label=255 ignores them; or {instead}"
        )
    return MovedMasks(source, {name: outside or 0 for name, outside in masks.items()}, augment)


def move(masks: np.ndarray, parameters: AugmentationParameters, outside: int) -> np.ndarray:
    """Moves the pixels of integer masks (n, H, W) as apply() in augment.py moves the pixels of
    images; a resized crop takes the nearest pixel."""
    rows, columns = _sources_of_pixels(parameters, *masks.shape)
    moved = _taken(masks, rows[:, :, None], columns[:, None], outside)
    if parameters.operation is None or parameters.argument is None:
        return moved
    moved_places = implementing_module(CHANGES).moved_places
    for operation, argument in zip(parameters.operation.T, parameters.argument.T, strict=True):
        of_places, rows, columns = moved_places(operation, argument, *masks.shape[1:])
        moved[of_places] = _taken(moved[of_places], rows, columns, outside)
    return moved


def _taken(masks: np.ndarray, rows: np.ndarray, columns: np.ndarray, outside: int) -> np.ndarray:
    """Returns the pixels of masks (n, H, W) at these rows and columns, integers that broadcast to
    this shape; `outside` for pixels beyond the mask."""
    n, height, width = masks.shape
    found = masks[np.arange(n)[:, None, None], rows.clip(0, height - 1), columns.clip(0, width - 1)]
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return np.where(is_inside, found, np.asarray(outside, masks.dtype))


def _sources_of_pixels(
    parameters: AugmentationParameters, n: int, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the column that each pixel comes from, int64 (n, H) and (n, W); they may
    be outside the image."""
    if parameters.crop_box is not None:
        down, across = interpolate_box(parameters.crop_box, parameters.flipped, height, width)
        rows, columns = (
            np.where(2 * axis.weight < WEIGHT_ONE, axis.low, axis.high) for axis in (down, across)
        )
        return rows, columns
    shift = parameters.shift if parameters.shift is not None else parameters.reflected_shift
    shift = np.zeros((n, 2), np.int64) if shift is None else shift
    rows = np.arange(height) + shift[:, :1]
    columns = np.arange(width) + shift[:, 1:]
    if parameters.reflected_shift is not None:
        rows = _reflected(rows, height)
        columns = _reflected(columns, width)
    if parameters.flipped is not None:
        columns = np.where(parameters.flipped[:, None], columns[:, ::-1], columns)
    return rows, columns


def _reflected(at: np.ndarray, size: int) -> Any:
    """Reflects positions outside 0 ... size - 1 at the border pixels."""
    return np.where(at < 0, -at, np.where(at >= size, 2 * (size - 1) - at, at))

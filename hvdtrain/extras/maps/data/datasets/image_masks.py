"""A folder of images beside a folder of masks with the same names; each pixel of a mask is a class
number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.progress import fold
from hvdtrain.data.field import Field
from hvdtrain.data.files.folders import check_folder
from hvdtrain.data.option_error import OptionError, expanded
from hvdtrain.data.source import Source, Split, check_indices
from hvdtrain.errors import UserError, short
from hvdtrain.extras.image_files.decode import (
    Undecoded,
    centre_square,
    check_image_options,
    height_and_width,
    mask_numbers,
    read_file,
)
from hvdtrain.extras.image_files.image_source import find_images, left_out_note

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
_HOW = "DIR/train/images/a.jpg with DIR/train/masks/a.png, and the same in val"
_DIGEST_SAMPLES = 16


@dataclass(frozen=True, eq=False)
class MaskedImages(Source):
    """A source of {"x": uint8 (n, H, W, C), "y": uint8 (n, H, W)}, each pair is decoded every time
    it is read. Safe to read from several threads."""

    folder: str
    images: tuple[str, ...]  # below images/
    masks: tuple[str, ...]  # below masks/
    shape: tuple[int, int, int]  # (H, W, C)
    # take the centre square; otherwise every image must have the size of the first training image
    crop: bool
    notes: tuple[str, ...] = ()  # for the user

    @property
    def where(self) -> str:
        return self.folder

    @property
    def fields(self) -> Mapping[str, Field]:
        return {"x": Field("uint8", self.shape), "y": Field("uint8", self.shape[:2])}

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        x, y = (np.empty((len(indices), *field.shape), np.uint8) for field in self.fields.values())
        for row, index in enumerate(indices.tolist()):
            x[row], y[row] = self._pair(index)
        return {"x": x, "y": y}

    def _pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image_file = f"{self.folder}/images/{self.images[index]}"
        mask_file = f"{self.folder}/masks/{self.masks[index]}"
        image = Undecoded(read_file(image_file), lambda: image_file)
        content = read_file(mask_file)
        sizes = (image.height, image.width), height_and_width(content, lambda: mask_file)
        wanted = sizes[0] if self.crop else self.shape[:2]
        for size, file in zip(sizes, (image_file, mask_file), strict=True):
            if size != wanted:
                what = (
                    f"it has {size[1]} x {size[0]} pixels, and "
                    f"{'its image' if self.crop else 'the first image'} {wanted[1]} x {wanted[0]}"
                )
                fix = (
                    "a mask as large as its image"
                    if self.crop
                    else "data.size=N resizes the centre square of each pair to N x N"
                )
                raise UserError(what, file, fix)
        box = centre_square(image.height, image.width) if self.crop else None
        pixels = np.frombuffer(image.pixels(self.shape, box), np.uint8).reshape(self.shape)
        return pixels, mask_numbers(content, self.shape[:2], box, lambda: mask_file)

    def digests(self, seed: int) -> dict[str, str]:
        """Returns digests of all names, and of 16 pairs drawn by the seed."""
        drawn = fold(seed, np.arange(_DIGEST_SAMPLES, dtype=np.uint64)) % np.uint64(len(self))
        return {
            **self.identity(),
            "images": digest(dict(self.read(np.unique(drawn).astype(np.int64)))),
        }

    def identity(self) -> dict[str, str]:
        names = "\n".join((*self.images, *self.masks)).encode("utf-8", "surrogateescape")
        return {"names": digest({"names": np.frombuffer(names, np.uint8)})}


def build(
    name: str, root: Path | None, split: Split, *, size: int | None = None, channels: int = 3
) -> MaskedImages:
    """Images in <root>/<split>/images/, with masks in <root>/<split>/masks/, whose names may only
    differ in the suffix.

    Masks are 8-bit grey or palette images; their pixel values are class numbers: task.classes=N.
    `split` is train, and val, validation or test (the first that exists).

    size: height and width of the images, made from the centre squares, of masks by the nearest
        pixel (none: all have one size already)
    channels: 3 for colour, 1 for grey

    Raises UserError without a root, if an image has no mask, and if a file cannot be read.
    """
    if root is None:
        raise OptionError(
            f"data.name={name} needs data.root", "root", f"data.root=DIR, with {_HOW}"
        )
    check_image_options(size, channels)
    root = expanded(root, "root")
    check_folder(root, f"data.root=DIR, with {_HOW}")
    folder = _split_folder(root, split)
    images, masks, left_out = _pairs(folder)
    first_folder = _split_folder(root, "train") if (root / "train").is_dir() else folder
    first = f"{first_folder}/images/{images[0] if first_folder == folder else _pairs(first_folder)[0][0]}"  # noqa: E501
    height, width = (size, size) if size else height_and_width(read_file(first), lambda: first)
    notes = left_out_note(left_out, str(folder / "images"))
    return MaskedImages(
        str(folder), images, masks, (height, width, channels), size is not None, notes
    )


def _split_folder(root: Path, split: Split) -> Path:
    for folder in _SPLITS[split]:
        if (root / folder).is_dir():
            return root / folder
    raise UserError(
        f"no folder {' or '.join(_SPLITS[split])}",
        str(root),
        f"data.root=DIR, with {_HOW}; or data.val_share=0.1",
    )


def _pairs(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """Returns the names of images, the names of their masks, and the files that are skipped. Raises
    UserError for an image without a mask or a mask without an image."""
    for part in ("images", "masks"):
        if not (folder / part).is_dir():
            raise UserError(f"no folder {part}", str(folder), f"data.root=DIR, with {_HOW}")
    try:
        found = find_images(str(folder / "images"))
        of_masks = find_images(str(folder / "masks"))
    except OSError as error:
        raise UserError(
            f"cannot list the images: {error}", str(folder), "repair or remove what is named"
        ) from error
    by_name = {str(PurePosixPath(mask).with_suffix("")): mask for mask in of_masks.images}
    masks = [by_name.get(str(PurePosixPath(image).with_suffix(""))) for image in found.images]
    if not masks or None in masks:
        what = (
            f"{short(found.images[masks.index(None)])} has no mask"
            if masks
            else "there are no images"
        )
        raise UserError(what, str(folder), _HOW)
    return tuple(found.images), tuple(mask for mask in masks if mask), found.left_out

"""ImageSource: images that threads or worker processes decode at every read and do not keep; also
finds the image files of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hvdtrain.data.field import Field
from hvdtrain.data.images.resized_crop import crop_boxes, draw_keys
from hvdtrain.data.labels import read_labels
from hvdtrain.data.source import LabelledImages, check_indices
from hvdtrain.data.worker_pool import WorkerPool
from hvdtrain.errors import UserError, short
from hvdtrain.extras.image_files.decode import (
    SUFFIXES,
    CropBox,
    Name,
    Undecoded,
    centre_square,
    read_file,
)

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_SMALL_BYTES = 2**12  # an image file of 100 x 100 pixels
_GROUP = 16  # images whose files are in memory at the same time
_GROUP_BYTES = 2**22
_MOST_NAMED = 3  # skipped files that a note names


class EncodedImages(Protocol):
    """Image files by index, wherever they are stored. Safe to call from several threads."""

    @property
    def where(self) -> str:
        """Where the images are, for messages."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> bytes:
        """Returns the bytes of an image file. Raises UserError if it cannot be read."""

    def name(self, index: int) -> str:
        """Returns the name of an image for messages. May take time, because it may search an
        archive."""


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Decodes images into arrays. Each worker process has a copy."""

    encoded: EncodedImages
    shape: tuple[int, int, int]  # (H, W, C)
    crop: bool  # take the centre square; otherwise every image must have the size of `first`
    first: Name  # the image that `shape` was read from
    smallest_box: float  # smallest share of the image in a random resized crop
    upright: bool = False  # data.exif=apply
    defined_at: str = __name__

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": Field("uint8", self.shape)}

    @property
    def name(self) -> str:
        return self.encoded.where

    def read_into(
        self, arrays: Mapping[str, np.ndarray], indices: np.ndarray, seeds: np.ndarray | None
    ) -> None:
        """Reads images into arrays: random boxes if `seeds` are given, as from draw_keys(),
        otherwise as for evaluation.

        Raises UserError if an image cannot be decoded.
        """
        x = arrays["x"]
        for start, images in self._groups(indices.tolist()):
            boxes = (
                self._own_boxes(images)
                if seeds is None
                else self._random_boxes(images, seeds[start : start + len(images)])
            )
            for row, (image, box) in enumerate(zip(images, boxes, strict=True), start):
                x[row] = np.frombuffer(image.pixels(self.shape, box), np.uint8).reshape(self.shape)

    def _groups(self, indices: list[int]) -> Iterator[tuple[int, list[Undecoded]]]:
        """Yields groups of images with the position of the first: boxes are drawn for a whole
        group, and large files are not kept."""
        images: list[Undecoded] = []
        size = 0
        for place, index in enumerate(indices):
            content = self.encoded.content(index)
            images.append(Undecoded(content, partial(self.encoded.name, index), self.upright))
            size += len(content)
            if len(images) == _GROUP or size > _GROUP_BYTES or place == len(indices) - 1:
                yield place + 1 - len(images), images
                images = []
                size = 0

    def _own_boxes(self, images: list[Undecoded]) -> list[CropBox | None]:
        """Returns the centre squares; None if all images have the size of the first."""
        if self.crop:
            return [centre_square(image.height, image.width) for image in images]
        self._check_sizes(images)
        return [None] * len(images)

    def _random_boxes(self, images: list[Undecoded], keys: np.ndarray) -> list[CropBox]:
        if not self.crop:
            self._check_sizes(images)
        heights, widths = np.array([(image.height, image.width) for image in images]).T
        corners = crop_boxes(keys, self.smallest_box, heights, widths).tolist()
        return [
            CropBox(top, left, height, width, may_be_coarse=True)
            for top, left, height, width in corners
        ]

    def _check_sizes(self, images: list[Undecoded]) -> None:
        """Raises UserError if an image has another size than the first one."""
        height, width, _ = self.shape
        for image in images:
            if (image.height, image.width) != (height, width):
                raise UserError(
                    f"the images differ in size: {width} x {height} and {image.width} x "
                    f"{image.height} pixels",
                    f"{self.first()} and {image.name()}",
                    f"data.size={min(height, width)} resizes the centre square of every image to "
                    "that size",
                )


@dataclass(frozen=True, eq=False)
class ImageSource(LabelledImages):
    """A source that decodes each image when it is read, on the reading thread or in worker
    processes."""

    encoded: EncodedImages
    y: np.ndarray  # integers (n,), each in 0..classes-1
    classes: int
    shape: tuple[int, int, int]  # (H, W, C)
    crop: bool  # take the centre square; otherwise every image must have the size of `first`
    first: Name  # the image that `shape` was read from
    class_names: tuple[str, ...] = ()
    workers: WorkerPool | None = None
    # augment.resized_crop: reads for training take a random box of each image; 0: they are as for
    # evaluation
    smallest_box: float = 0.0
    upright: bool = False  # rotate images by their EXIF orientation
    notes: tuple[str, ...] = ()  # for the user
    small_images_lock: Lock = field(default_factory=Lock)

    def __len__(self) -> int:
        return len(self.encoded)

    def labels(self) -> np.ndarray:
        return self.y

    @property
    def crops_at_random(self) -> bool:
        """Whether read_in_epochs() gives random boxes of the images."""
        return self.smallest_box > 0

    def read(self, indices: np.ndarray) -> Batch:
        """Reads the images as for evaluation. Raises UserError if an image cannot be decoded, or a
        worker process ended."""
        return self._read(indices, None)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        """Reads the images as for training in these epochs, int64 (n,)."""
        return self._read(
            indices, draw_keys(seed, epochs, indices) if self.crops_at_random else None
        )

    def _read(self, indices: np.ndarray, keys: np.ndarray | None) -> Batch:
        check_indices(indices, len(self))
        if self.workers is not None:
            x = self.workers.read(indices, keys)["x"]
        else:
            x = np.empty((len(indices), *self.shape), np.uint8)
            with self._one_thread_if_small(indices):
                self.reader.read_into({"x": x}, indices, keys)
        return {"x": x, "y": read_labels(self.y, indices)}

    @property
    def reader(self) -> ImageReader:
        return ImageReader(
            self.encoded, self.shape, self.crop, self.first, self.smallest_box, self.upright
        )

    def read_by(self, workers: int) -> ImageSource:
        """Returns this source with images decoded in `workers` processes."""
        return replace(self, workers=WorkerPool(self.reader, workers))

    def cropped(self, smallest_box: float) -> ImageSource:
        """Returns this source with random crops: a training image is a random box with at least
        this share of the original."""
        return replace(self, smallest_box=smallest_box)

    def is_small(self, index: int) -> bool:
        """Whether the image's file is small: decoding it is mostly Python, so one thread is as fast
        as several."""
        return len(self.encoded.content(index)) < _SMALL_BYTES

    def _one_thread_if_small(self, indices: np.ndarray) -> AbstractContextManager[object]:
        """Makes threads read batches of small images one after the other.

        Two threads contend for the interpreter lock at every file. They read 0.56 times as many 32
        x 32 images as one thread, but 1.65 times as many 500 x 375 images.
        """
        return (
            self.small_images_lock
            if len(indices) > 0 and self.is_small(int(indices[0]))
            else nullcontext()
        )


@dataclass(frozen=True)
class ImageFiles:
    """EncodedImages in one folder."""

    where: str
    paths: list[str]  # relative to `where`; a Path would take four times the memory

    def __len__(self) -> int:
        return len(self.paths)

    def content(self, index: int) -> bytes:
        return read_file(self.name(index))

    def name(self, index: int) -> str:
        return f"{self.where}/{self.paths[index]}"


class FoundImages(NamedTuple):
    """Names relative to the folder, with /; names of skipped folders end with /."""

    images: list[str]  # sorted by folder, then by name, as in torchvision's ImageFolder
    left_out: list[str]  # hidden files and folders, and files with another suffix


def find_images(folder: str) -> FoundImages:
    """Finds all image files below a folder; links are followed. Raises UserError for a circle of
    links, and OSError for a folder that cannot be listed."""
    images: list[tuple[str, list[str]]] = []
    left_out: list[str] = []
    _walk(folder, "", images, left_out)
    return FoundImages(
        [below + name for below, names in sorted(images, key=_folder) for name in names],
        sorted(left_out),
    )


def left_out_note(left_out: Sequence[str], folder: str) -> tuple[str, ...]:
    """Returns a note if files were skipped."""
    if not left_out:
        return ()
    named = ", ".join(map(short, left_out[:_MOST_NAMED])) + (
        ", ..." if len(left_out) > _MOST_NAMED else ""
    )
    what = (
        "1 file or folder that is"
        if len(left_out) == 1
        else f"{len(left_out):,} files and folders that are"
    )
    return (f"{folder}: left out {what} hidden or no image ({' '.join(SUFFIXES)}): {named}",)


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def _folder(found: tuple[str, list[str]]) -> str:
    """Returns the path of the folder, without the last /, as a sort key: a/b comes before a/b-2,
    which comes before a/b/c."""
    return found[0].rstrip("/")


def _walk(folder: str, below: str, found: list[tuple[str, list[str]]], left_out: list[str]) -> None:
    """Adds the images of a folder and its subfolders. below: the path of the folder relative to the
    root, "" or ending with /."""
    names = []
    folders = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_folder = entry.is_dir()
            if is_hidden(entry.name) or not (is_folder or entry.name.lower().endswith(SUFFIXES)):
                left_out.append(f"{below}{entry.name}{'/' * is_folder}")
            elif is_folder:
                _refuse_circle(entry, folder)
                folders.append(entry.name)
            else:
                names.append(entry.name)
    found.append((below, names))
    for name in folders:
        _walk(os.path.join(folder, name), f"{below}{name}/", found, left_out)


def _refuse_circle(entry: os.DirEntry[str], folder: str) -> None:
    if entry.is_symlink():
        target = os.path.realpath(entry.path)
        here = os.path.realpath(folder)
        if os.path.commonpath([target, here]) == target:
            raise UserError(
                f"a circle of links: it leads back to {short(target)}",
                entry.path,
                "remove the link",
            )

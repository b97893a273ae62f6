"""A folder of images for each class. They are decoded once into array files, or each time they are
read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from hvdtrain.data.files.folders import cache_root, check_folder
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.files.staging import splits_of_images
from hvdtrain.data.labels import smallest
from hvdtrain.data.option_error import OptionError, expanded
from hvdtrain.data.source import LabelledImages, Split
from hvdtrain.errors import UserError, short
from hvdtrain.extras.image_files.decode import (
    SUFFIXES,
    check_file,
    check_image_options,
    height_and_width,
    read_file,
)
from hvdtrain.extras.image_files.decoded_files import pack
from hvdtrain.extras.image_files.image_source import (
    ImageFiles,
    ImageSource,
    find_images,
    is_hidden,
    left_out_note,
)

_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
# class -> names of its images in its folder, both in sorted order
ImagesByClass = dict[str, list[str]]


STAGING = Staging(is_of_user=True, keeps_decoded=True, selections=splits_of_images)


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    size: int | None = None,
    channels: int = 3,
    packed: bool = True,
    cache: Path | None = None,
    exif: Literal["ignore", "apply"] = "ignore",
) -> LabelledImages:
    """Images in <root>/<split>/<class>/ and its subfolders; `split` is train, and val, validation
    or test (the first that exists).

    Files are jpg, jpeg, png, bmp, webp, tif, tiff, gif, ppm and pgm, of several frames the first;
    all other files are listed in the header. Class numbers follow the sorted names of train's
    folders. The first run decodes every image once and keeps the pixels in array files of 1 GiB; a
    change of any file's name, size or time makes new ones. Mean and deviation are computed from all
    images if they fit into one file, else from at most 2,000, the same in every run.

    size: height and width of the images, made from the centre square of each (pixels; none: all
        have one size already)
    channels: 3 for colour, 1 for grey
    packed: false: no array files are written, each image is decoded whenever it is read (true or
        false)
    cache: folder of the array files (none: $XDG_CACHE_HOME/hvdtrain/folders, or
        ~/.cache/hvdtrain/folders)
    exif: apply: images are turned as the EXIF orientation in the file says; ignore: pixels are as
        they are stored

    Raises UserError without a root, and if images cannot be listed or decoded.
    """
    if root is None:
        raise OptionError(
            "data.name=folder needs data.root",
            "root",
            "data.root=DIR, with images in DIR/train/<class>/",
        )
    check_image_options(size, channels)
    root = expanded(root, "root")
    try:
        files = _find_images(root, split)
        key = (
            _key(files, f"{size} {channels}{' exif' if exif == 'apply' else ''}") if packed else ""
        )
    except OSError as error:
        raise UserError(
            f"cannot list the images: {error}", str(root), "repair or remove what is named"
        ) from error
    first = files.first_of_train
    height, width = (
        (size, size) if size else height_and_width(read_file(first), lambda: first, exif == "apply")
    )
    paths = [f"{label}/{image}" for label, images in files.classes.items() for image in images]
    y = np.repeat(np.arange(len(files.classes)), [len(images) for images in files.classes.values()])
    source = ImageSource(
        encoded=ImageFiles(str(files.folder), paths),
        y=smallest(y),
        classes=len(files.classes),
        shape=(height, width, channels),
        crop=size is not None,
        first=partial(str, first),
        class_names=tuple(map(short, files.classes)),
        upright=exif == "apply",
        notes=left_out_note(files.left_out, str(files.folder)),
    )
    if not packed:
        return source
    arrays = expanded(cache, "cache") if cache else cache_root() / "folders"
    return pack(source, arrays / key)


class _SplitFiles(NamedTuple):
    """The image files of one split."""

    folder: Path
    classes: ImagesByClass
    first_of_train: str  # if no size is set, all images must have this image's height and width
    left_out: list[str]  # files and folders in `folder`


def check_splits(root: Path | None) -> None:
    """Raises UserError if train or val is missing, or if they have different classes. Reads only
    the names of folders."""
    if root is None:  # build() refuses it
        return
    root = expanded(root, "root")
    train = _split_folder(root, "train")
    val = _split_folder(root, "val")
    try:
        _compare_classes(_class_names(train), _class_names(val), val)
    except OSError as error:
        raise UserError(
            f"cannot list the images: {error}", str(root), "repair or remove what is named"
        ) from error


def _find_images(root: Path, split: Split) -> _SplitFiles:
    """Finds the image files of a split. Raises OSError, and UserError if train and the split have
    different classes or a class has no images.

    A validation set without train takes the classes from its own folders, so that an existing model
    can be evaluated with it.
    """
    folder = _split_folder(root, split)
    train_folder = (
        folder if split == "val" and not (root / "train").is_dir() else _split_folder(root, "train")
    )
    train, left_out = _list_classes(train_folder)
    classes, left_out = (train, left_out) if folder == train_folder else _list_classes(folder)
    _compare_classes(train, classes, folder)
    label, images = next(iter(train.items()))
    return _SplitFiles(folder, classes, str(train_folder / label / images[0]), left_out)


def _compare_classes(train: Collection[str], classes: Collection[str], folder: Path) -> None:
    """Raises UserError if a class is only in one of train and `folder`."""
    if different := sorted({*train} ^ {*classes}):
        what = f"only one of train and {folder.name} has class {', '.join(map(short, different))}"
        raise UserError(what, str(folder), "the same class folders in both")


def _split_folder(root: Path, split: Split) -> Path:
    """Returns the folder of a split. Raises UserError if it does not exist, and OSError."""
    check_folder(root, f"data.root=DIR, with images in DIR/{split}/<class>/")
    for folder in _FOLDERS[split]:
        if (root / folder).is_dir():
            return root / folder
    fix = f"data.root=DIR, with images in DIR/{split}/<class>/"
    if split == "val":
        fix += "; or data.val_share=0.1, which takes a tenth of train instead"
    raise UserError(f"no folder {' or '.join(_FOLDERS[split])}", str(root), fix)


def _class_names(folder: Path) -> list[str]:
    """Returns the sorted names of the class folders; hidden folders are skipped."""
    return sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and not is_hidden(entry.name)
    )


def _list_classes(folder: Path) -> tuple[ImagesByClass, list[str]]:
    """Returns the image files of each class, and the names of all other files. Raises UserError if
    a class has no images."""
    by_class = {name: find_images(str(folder / name)) for name in _class_names(folder)}
    classes = {name: images for name, (images, _) in by_class.items()}
    left_out = sorted(
        f"{entry.name}{'/' * entry.is_dir()}"
        for entry in os.scandir(folder)
        if entry.name not in by_class
    )
    left_out += [f"{name}/{file}" for name, (_, files) in by_class.items() for file in files]
    empty = [name for name, files in classes.items() if not files]
    if empty or not classes:
        what = "no class folders"
        if empty:
            what = f"no images ({' '.join(SUFFIXES)}) in class {', '.join(map(short, empty))}"
        raise UserError(
            what, str(folder), "one folder for each class, with images in it or in its folders"
        )
    return classes, left_out


def _key(found: _SplitFiles, options: str) -> str:
    """Returns the name of the array files. It changes with the options, with any file's name, size
    or time, and with the content of each class's first image.

    The content is hashed too because unpacking an archive may give all files the same time. Raises
    OSError, UserError.
    """
    hashed = hashlib.blake2b(options.encode(), digest_size=12)
    for label, images in found.classes.items():
        for number, image in enumerate(images):
            path = found.folder / label / image
            status = check_file(path)
            if number == 0:
                hashed.update(path.read_bytes())
            hashed.update(
                f"{label}/{image}\0{status.st_size} {status.st_mtime_ns}\n".encode(
                    errors="surrogateescape"
                )
            )
    return hashed.hexdigest()

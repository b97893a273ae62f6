"""A folder of images for each class, decoded once into array files, or whenever an image is read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.config.read import expand
from hvdtrain.config.yaml_reader import short
from hvdtrain.data.files.download import cache_root
from hvdtrain.data.images.decode import SUFFIXES, check_file, check_look, extent, read_file
from hvdtrain.data.images.image_source import Streamed
from hvdtrain.data.images.pack import pack
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError

_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
Classes = dict[str, list[str]]  # class -> names of its images, both in sorted order


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    size: int | None = None,
    channels: int = 3,
    packed: bool = True,
    cache: Path | None = None,
) -> Source:
    """Images in <root>/<split>/<class>/*.{jpg,jpeg,png,bmp,webp}; `split` is train, and val, validation or test (the first that is there).

    Class numbers follow the sorted names of train's folders. The first run decodes every image once and keeps the pixels in array files of
    1 GiB; a change of any file's name, size or time makes new ones. Mean and deviation are of all images if one file holds them, else of a
    fixed 2,000 of them, at most.

    size: height and width that images are brought to, centre square of the image (pixels; none: they are all alike already)
    channels: 3 for colour, 1 for grey
    packed: false: nothing is written, each image is decoded whenever it is read (true or false)
    cache: folder of the array files (none: $XDG_CACHE_HOME/hvdtrain/folders, or ~/.cache/hvdtrain/folders)
    """
    if root is None:
        raise UserError("an image folder needs its place", "data.root", "data.root=DIR, with images in DIR/train/<class>/")
    check_look(size, channels)
    root = expand(root, "data.root")
    try:
        folder, classes, first = _list(root, split)
        key = _key(folder, classes, f"{size} {channels}") if packed else ""
    except OSError as error:
        raise UserError(f"cannot list the images: {error}", str(root), "mend or remove what is named") from error
    height, width = (size, size) if size else extent(read_file(first), lambda: first)
    files = _Files(str(folder), [f"{label}/{image}" for label, images in classes.items() for image in images])
    y = np.repeat(np.arange(len(classes)), [len(images) for images in classes.values()]).astype(np.int64)
    images = Streamed(files, y, len(classes), (height, width, channels), size is not None, lambda: first)
    return pack(images, (expand(cache, "data.cache") if cache else cache_root() / "folders") / key) if packed else images


@dataclass(frozen=True)
class _Files:
    """The images of one split, by class, then by name."""

    where: str  # the split's folder
    paths: list[str]  # class/name: a Path takes four times the memory

    def __len__(self) -> int:
        return len(self.paths)

    def content(self, place: int) -> bytes:
        return read_file(self.name(place))

    def name(self, place: int) -> str:
        return f"{self.where}/{self.paths[place]}"


def _list(root: Path, split: Split) -> tuple[Path, Classes, str]:
    """The folder of a split, its images, and train's first image: without a size, all have to have its extent."""
    origin = _split_folder(root, "train")
    train = _classes(origin)
    folder = _split_folder(root, split)
    classes = train if split == "train" else _classes(folder)
    if classes.keys() != train.keys():
        odd = ", ".join(map(short, sorted(classes.keys() ^ train.keys())))
        raise UserError(f"only one of train and {folder.name} has class {odd}", str(folder), "the same class folders in both")
    label, images = next(iter(train.items()))
    return folder, classes, str(origin / label / images[0])


def _split_folder(root: Path, split: Split) -> Path:
    for folder in _FOLDERS[split]:
        if (root / folder).is_dir():
            return root / folder
    raise UserError(f"no folder {' or '.join(_FOLDERS[split])}", str(root), f"data.root=DIR, with images in DIR/{split}/<class>/")


def _classes(folder: Path) -> Classes:
    """Sorted image files of each class, classes in sorted order; hidden names are passed over."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    classes = {name: _images(folder / name) for name in names}
    empty = [name for name, files in classes.items() if not files]
    if empty or not classes:
        what = f"no images ({' '.join(SUFFIXES)}) in class {', '.join(map(short, empty))}" if empty else "no class folders"
        raise UserError(what, str(folder), "one folder for each class, the images directly in it")
    return classes


def _images(folder: Path) -> list[str]:
    return [name for name in sorted(os.listdir(folder)) if name.lower().endswith(SUFFIXES) and not name.startswith(".")]


def _key(folder: Path, classes: Classes, options: str) -> str:
    """Changes with any file's name, size or time, with each class's first image (archives may set all times alike), with the options."""
    hashed = hashlib.blake2b(options.encode(), digest_size=12)
    for label, images in classes.items():
        for image in images:
            stat = check_file(folder / label / image)
            if image is images[0]:
                hashed.update((folder / label / image).read_bytes())
            hashed.update(f"{label}/{image}\0{stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return hashed.hexdigest()

"""Images in WebDataset's tar archives, read by their position: shuffled, shared out and resumed like any other data set."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from hvdtrain.config.read import expand
from hvdtrain.config.yaml_reader import short
from hvdtrain.data.files.download import alone, cache_root
from hvdtrain.data.images.decode import check_look, extent
from hvdtrain.data.images.image_source import Streamed
from hvdtrain.data.images.pack import array_file, load_array, pack
from hvdtrain.data.images.tar_index import name_at, samples
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError

_PARTS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_HEAD_BYTES = 4096  # of each archive that its index is bound to: copies may set all times alike


def build(  # noqa: PLR0913 - the options that a user types
    name: str,
    root: Path | None,
    split: Split,
    *,
    size: int | None = None,
    channels: int = 3,
    classes: int | None = None,
    packed: bool = False,
    cache: Path | None = None,
) -> Source:
    """Samples KEY.jpg (jpeg, png, webp) with KEY.cls, in <root>/<split>/*.tar or <root>/<split>-*.tar, `split` as for image folders.

    The archives are plain tar files. The first run notes where each image lies; from then on each is decoded out of its archive whenever it
    is read, in any order. Mean and deviation are of a fixed 2,000 images, at most.

    size: height and width that images are brought to, centre square of the image (pixels; none: they are all alike already)
    channels: 3 for colour, 1 for grey
    classes: classes (none: train's largest label, and one)
    packed: true: decode every image once, into array files, as data.name=folder does (true or false)
    cache: folder of the index and the array files (none: $XDG_CACHE_HOME/hvdtrain/webdataset, or ~/.cache/hvdtrain/webdataset)
    """
    if root is None:
        raise UserError(
            "WebDataset archives need their place", "data.root", "data.root=DIR, with archives DIR/train/*.tar and DIR/val/*.tar"
        )
    check_look(size, channels)
    if classes is not None and classes < 1:
        raise UserError(f"{classes} classes are impossible", "data.classes", "1 or more")
    home = expand(cache, "data.cache") if cache else cache_root() / "webdataset"
    train = _archives(expand(root, "data.root"), "train", home)
    archives = train if split == "train" else _archives(expand(root, "data.root"), split, home)
    classes = classes or int(train.labels.max()) + 1
    _check_labels(archives, classes)
    first = partial(train.name, 0)
    height, width = (size, size) if size else extent(train.content(0), first)
    images = Streamed(archives, archives.labels, classes, (height, width, channels), size is not None, first)
    if not packed:
        return images
    return pack(images, home / hashlib.blake2b(f"{archives.key} {size} {channels}".encode(), digest_size=12).hexdigest())


class _Archive(NamedTuple):
    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True, eq=False)
class _Archives:
    """The images of one split."""

    where: str
    files: list[_Archive]
    key: str  # changes with the name, size, time and beginning of any
    index: np.ndarray  # int64 (4, n): archive, offset in it, size, label

    @property
    def labels(self) -> np.ndarray:
        return self.index[3]

    def __len__(self) -> int:
        return self.index.shape[1]

    def content(self, place: int) -> bytes:
        """Opened anew each time: archives may be more than a process may hold open, and a disk's own cache makes it cheap."""
        number, offset, size = self.index[:3, place].tolist()
        archive = self.files[number]
        try:
            file = os.open(archive.path, os.O_RDONLY)
            try:
                _check_unchanged(archive, os.fstat(file))
                content = os.pread(file, size, offset)
            finally:
                os.close(file)
        except OSError as error:
            raise UserError(f"the archive cannot be read: {error}", str(archive.path), "mend it, and start again") from error
        if len(content) != size:
            raise UserError(
                f"the archive ends in the middle of an image, at byte {offset + len(content)}", str(archive.path), "copy it again"
            )
        return content

    def name(self, place: int) -> str:
        number, offset = self.index[:2, place].tolist()
        return name_at(self.files[number].path, offset)


def _check_unchanged(archive: _Archive, seen: os.stat_result) -> None:
    if (seen.st_size, seen.st_mtime_ns) != (archive.size, archive.mtime_ns):
        raise UserError("the archive has changed since the job began", str(archive.path), "start again: its images are looked up anew")


def _archives(root: Path, split: Split, home: Path) -> _Archives:
    try:
        where, paths = _find(root, split)
        seen = [(path, path.stat()) for path in paths]
        files = [_Archive(path, stat.st_size, stat.st_mtime_ns) for path, stat in seen]
        key = _key(files)
    except OSError as error:
        raise UserError(f"cannot list the archives: {error}", str(root), "mend or remove what is named") from error
    try:
        return _Archives(where, files, key, _index(where, files, home / key))
    except OSError as error:
        fix = "data.cache=DIR, a folder that you may write to"
        raise UserError(f"cannot keep the index of the archives: {error}", str(home / key), fix) from error


def _find(root: Path, split: Split) -> tuple[str, list[Path]]:
    """The split's place, for messages, and its archives, by name."""
    for part in _PARTS[split]:
        for folder, start in ((root / part, ""), (root, f"{part}-")):
            names = sorted(name for name in os.listdir(folder) if name.startswith(start)) if folder.is_dir() else []
            packed = [name for name in names if name.lower().endswith(_COMPRESSED)]
            if packed:
                fix = "decompress it: images are read by their position in the archive"
                raise UserError("the archive is compressed", str(folder / short(packed[0])), fix)
            if tars := [folder / name for name in names if name.endswith(".tar") and not name.startswith(".")]:
                return str(folder / start) if start else str(folder), tars
    looked = " or ".join(f"{part}/*.tar or {part}-*.tar" for part in _PARTS[split])
    raise UserError(f"no archives {looked}", str(root), f"data.root=DIR, with archives DIR/{split}/*.tar")


def _key(files: list[_Archive]) -> str:
    hashed = hashlib.blake2b(digest_size=12)
    for archive in files:
        hashed.update(f"{archive.path.name}\0{archive.size} {archive.mtime_ns}\n".encode(errors="surrogateescape"))
        if archive.path.is_file():  # a pipe would hang; samples() refuses it
            with archive.path.open("rb") as file:
                hashed.update(file.read(_HEAD_BYTES))
    return hashed.hexdigest()


def _index(where: str, files: list[_Archive], home: Path) -> np.ndarray:
    """int64 (4, n), memory-mapped from `home`; one process of the machine reads the archives' headers, the others wait."""
    target = home / "index.npy"
    index = _load(target, files)
    if index is None:
        with alone(home, f"it looks up the images of {where}"):
            index = _load(target, files)
            if index is None:
                begun = perf_counter()
                table = _look_up(where, files)
                with array_file(target, "<i8", table.shape) as out:
                    out.write(table.tobytes())
                took = f"{perf_counter() - begun:.1f} s"
                print(f"found {table.shape[1]} images in {len(files)} archives of {where}: {took}", file=sys.stderr, flush=True)
                index = _load(target, files)
    assert index is not None, target
    return index


def _look_up(where: str, files: list[_Archive]) -> np.ndarray:
    rows = [
        np.array([(number, *found) for found in samples(archive.path)], np.int64).reshape(-1, 4) for number, archive in enumerate(files)
    ]
    table = np.ascontiguousarray(np.concatenate(rows).T)
    if not table.size:
        raise UserError("the archives hold no samples", where, "members KEY.jpg and KEY.cls")
    return table


def _load(target: Path, files: list[_Archive]) -> np.ndarray | None:
    """The index, or None where it is absent or points outside the archives."""
    index = load_array(target, np.dtype("<i8"), (4, None))
    if index is None or not index.size or index.min() < 0 or index[0].max() >= len(files):
        return None
    sizes = np.array([archive.size for archive in files])
    return index if (index[1] <= sizes[index[0]] - index[2]).all() else None


def _check_labels(archives: _Archives, classes: int) -> None:
    wrong = np.flatnonzero(archives.labels >= classes)
    if len(wrong):
        first = int(wrong[0])
        what = f"label {archives.labels[first]} is outside 0..{classes - 1}"
        raise UserError(what, archives.name(first), "mend it, or data.classes=N (where left out: train's largest label, and one)")

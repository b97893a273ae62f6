"""Images in WebDataset tar archives. They are read by position in any order, so they are shuffled
and resumed like any other data set."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np

from hvdtrain.data.files.folders import cache_root, check_folder, locked
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.files.staging import splits_of_images
from hvdtrain.data.labels import first_outside, smallest
from hvdtrain.data.option_error import OptionError, expanded
from hvdtrain.data.source import LabelledImages, Split
from hvdtrain.errors import UserError, short
from hvdtrain.extras.image_files.decode import check_image_options, height_and_width
from hvdtrain.extras.image_files.decoded_files import pack
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.extras.image_files.npy import load_npy, write_npy
from hvdtrain.extras.webdataset.download import downloaded, is_url
from hvdtrain.extras.webdataset.tar_index import index_samples, name_at

_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "test")}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# of the index
_PLACES = "places.npy"
_LABELS = "labels.npy"
_HEAD_BYTES = (
    # bytes of each archive that enter the key of its index, because copying may give all files the
    # same time
    4096
)


STAGING = Staging(
    is_of_user=True, keeps_decoded=True, selections=partial(splits_of_images, archives=True)
)


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    size: int | None = None,
    channels: int = 3,
    classes: int | None = None,
    packed: bool = False,
    cache: Path | None = None,
    exif: Literal["ignore", "apply"] = "ignore",
    val_archives: str | None = None,
) -> LabelledImages:
    """Samples KEY.jpg (jpeg, png, webp) with KEY.cls, in <root>/<split>/*.tar or
    <root>/<split>-*.tar, `split` as for image folders.

    The archives are plain tar files. The first run writes an index of the images; each image is
    then decoded from its archive every time it is read, in any order. Mean and deviation are
    computed from at most 2,000 images, the same in every run.

    size: height and width of the images, made from the centre square of each (pixels; none: all
        have one size already)
    channels: 3 for colour, 1 for grey
    classes: number of classes (none: train's largest label plus 1; without train that of the split,
        to evaluate a model with it)
    packed: true: decode every image once, into array files, as data.name=folder does (true or
        false)
    cache: folder of the index and the array files (none: $XDG_CACHE_HOME/hvdtrain/webdataset, or
        ~/.cache/hvdtrain/webdataset)
    exif: apply: images are turned as the EXIF orientation in the file says; ignore: pixels are as
        they are stored
    val_archives: archives of validation, if data.root is a URL of training archives: a URL, or a
        name beside them, such as val-{000..003}.tar (none: data.val_share)

    data.root may be a URL https://host/train-{000..009}.tar; the archives are copied to the cache
    once on each machine. Other URLs, such as s3://, need fsspec.

    Raises UserError without a root, and if an archive is damaged.
    """
    if root is None:
        fix = "data.root=DIR, with archives DIR/train/*.tar and DIR/val/*.tar"
        raise OptionError("data.name=webdataset needs data.root", "root", fix)
    check_image_options(size, channels)
    if classes is not None and classes < 1:
        raise OptionError(f"{classes} classes are impossible", "classes", "1 or more")
    cache = expanded(cache, "cache") if cache else cache_root() / "webdataset"
    if is_url(root):
        root = downloaded(root, val_archives, cache)
    elif val_archives is not None:
        what = "data.val_archives needs archives that are named by a URL"
        raise OptionError(what, "val_archives", "data.root=DIR has them in DIR/val; leave it out")
    root = expanded(root, "root")
    archives = _open_archives(root, split, cache)
    train = (
        archives
        if split == "train" or not _has_train(root)
        else _open_archives(root, "train", cache)
    )
    classes = classes or int(train.labels.max()) + 1
    _check_labels(archives, classes)
    first = partial(train.name, 0)
    height, width = (
        (size, size) if size else height_and_width(train.content(0), first, exif == "apply")
    )
    source = ImageSource(
        encoded=archives,
        y=archives.labels,
        classes=classes,
        shape=(height, width, channels),
        crop=size is not None,
        first=first,
        upright=exif == "apply",
    )
    if not packed:
        return source
    key = hashlib.blake2b(
        f"{archives.key} {size} {channels}{' exif' if exif == 'apply' else ''}".encode(),
        digest_size=12,
    ).hexdigest()
    return pack(source, cache / key)


class _Archive(NamedTuple):
    """One tar file in the state in which its index was made or checked."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True, eq=False)
class _Archives:
    """EncodedImages of one split."""

    where: str
    files: list[_Archive]
    key: str  # changes with the name, size, time and beginning of each archive
    # folder of the index. Its two arrays are memory-mapped, so a rank only reads the places of its
    # own images
    folder: Path
    places: np.ndarray  # int64 (3, n): archive number, offset in the archive, size
    labels: np.ndarray  # smallest unsigned dtype that fits, (n,)

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the path of the index, which a worker process maps itself."""
        return _mapped, (self.where, self.files, self.key, self.folder)

    def place(self, index: int) -> tuple[_Archive, int, int]:
        """Returns the archive of an image file, its offset and its size. Raises UserError if the
        index is damaged."""
        number, offset, size = self.places[:, index].tolist()
        if (
            0 <= number < len(self.files)
            and 0 <= offset <= offset + size <= self.files[number].size
        ):
            return self.files[number], offset, size
        what = f"the index of {self.where} is damaged: image {index} is outside of its archive"
        raise UserError(
            what, str(self.folder), "remove this folder, and start again: the index is rebuilt"
        )

    def content(self, index: int) -> bytes:
        """Returns the bytes of one image file.

        The archive is opened each time, because there may be more archives than a process can keep
        open; the page cache makes that cheap. Raises UserError if it has changed since the index
        was made, or cannot be read.
        """
        archive, offset, size = self.place(index)
        try:
            file = os.open(archive.path, os.O_RDONLY)
            try:
                _check_unchanged(archive, os.fstat(file))
                content = os.pread(file, size, offset)
            finally:
                os.close(file)
        except OSError as error:
            raise UserError(
                f"the archive cannot be read: {error}",
                str(archive.path),
                "repair it, and start again",
            ) from error
        if len(content) != size:
            what = f"the archive ends in the middle of an image, at byte {offset + len(content)}"
            raise UserError(what, str(archive.path), "copy it again")
        return content

    def name(self, index: int) -> str:
        archive, offset, _ = self.place(index)
        return name_at(archive.path, offset)


def _mapped(where: str, files: list[_Archive], key: str, folder: Path) -> _Archives:
    return _Archives(where, files, key, folder, *_load_or_make_index(where, files, folder))


def _check_unchanged(archive: _Archive, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (archive.size, archive.mtime_ns):
        raise UserError(
            "the archive has changed since the job began",
            str(archive.path),
            "start again: a new index is made",
        )


def _open_archives(root: Path, split: Split, cache: Path) -> _Archives:
    """Returns the archives of one split with their index, which is read from the cache or made.
    Raises UserError."""
    try:
        shards = _find_archives(root, split)
        if shards is None:
            patterns = " or ".join(f"{name}/*.tar or {name}-*.tar" for name in _SPLITS[split])
            raise UserError(
                f"no archives {patterns}",
                str(root),
                f"data.root=DIR, with archives DIR/{split}/*.tar",
            )
        files = []
        for path in shards.paths:
            status = path.stat()
            files.append(_Archive(path, status.st_size, status.st_mtime_ns))
        key = _key(files)
    except OSError as error:
        raise UserError(
            f"cannot list the archives: {error}", str(root), "repair or remove what is named"
        ) from error
    try:
        return _mapped(shards.where, files, key, cache / key)
    except OSError as error:
        fix = "data.cache=DIR, a folder that you may write to"
        raise UserError(
            f"cannot write the index of the archives: {error}", str(cache / key), fix
        ) from error


def _has_train(root: Path) -> bool:
    """Whether there are training archives; an existing model can be evaluated without them. Raises
    UserError."""
    try:
        return _find_archives(root, "train") is not None
    except OSError as error:
        raise UserError(
            f"cannot list the archives: {error}", str(root), "repair or remove what is named"
        ) from error


class _TarShards(NamedTuple):
    where: str  # for messages: the folder, or the folder and the prefix of the names
    paths: list[Path]  # by name


def _find_archives(root: Path, split: Split) -> _TarShards | None:
    """Returns the tar files in <root>/<split>/ or, if there are none, <root>/<split>-*.tar; None if
    neither exists. Raises UserError, OSError."""
    check_folder(root, f"data.root=DIR, with archives DIR/{split}/*.tar")
    for name_of_split in _SPLITS[split]:
        for folder, prefix in ((root / name_of_split, ""), (root, f"{name_of_split}-")):
            names = (
                sorted(name for name in os.listdir(folder) if name.startswith(prefix))
                if folder.is_dir()
                else []
            )
            compressed = [name for name in names if name.lower().endswith(_COMPRESSED)]
            if compressed:
                fix = "decompress it: images are read by their position in the archive"
                raise UserError(
                    "the archive is compressed", str(folder / short(compressed[0])), fix
                )
            paths = [
                folder / name
                for name in names
                if name.endswith(".tar") and not name.startswith(".")
            ]
            if paths:
                return _TarShards(str(folder / prefix) if prefix else str(folder), paths)
    return None


def _key(files: list[_Archive]) -> str:
    hashed = hashlib.blake2b(digest_size=12)
    for archive in files:
        hashed.update(
            f"{archive.path.name}\0{archive.size} {archive.mtime_ns}\n".encode(
                errors="surrogateescape"
            )
        )
        if archive.path.is_file():  # opening a pipe would hang; index_samples() reports it
            with archive.path.open("rb") as file:
                hashed.update(file.read(_HEAD_BYTES))
    return hashed.hexdigest()


class _Index(NamedTuple):
    """The memory-mapped arrays of an index."""

    places: np.ndarray
    labels: np.ndarray


def _load_or_make_index(where: str, files: list[_Archive], folder: Path) -> _Index:
    """Loads the index from `folder`; if it is missing, one process on the machine creates it while
    the others wait. Raises UserError, OSError."""
    index = _load_index(folder)
    if index is None:
        with locked(folder, f"indexes the images of {where}"):
            index = _load_index(folder)
            if index is None:
                _make_index(where, files, folder)
                index = _load_index(folder)
    assert index is not None, folder
    return index


def _make_index(where: str, files: list[_Archive], folder: Path) -> None:
    """Reads the headers of all archives and writes the index."""
    began_s = perf_counter()
    rows = []
    for number, archive in enumerate(files):
        rows.append(
            np.array(
                [(number, *location) for location in index_samples(archive.path)], np.int64
            ).reshape(-1, 4)
        )
    index = np.ascontiguousarray(np.concatenate(rows).T)
    if not index.size:
        raise UserError("the archives hold no samples", where, "members KEY.jpg and KEY.cls")
    labels = smallest(index[3])
    for path, array in (
        (folder / _PLACES, index[:3]),
        (folder / _LABELS, labels.astype(labels.dtype.newbyteorder("<"))),
    ):
        with write_npy(path, array.dtype.str, array.shape) as out:
            out.write(array.tobytes())
    seconds = perf_counter() - began_s
    print(
        f"found {index.shape[1]} images in {len(files)} archives of {where}: {seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def _load_index(folder: Path) -> _Index | None:
    """Returns the index, or None if it is absent or truncated. A position is checked when its image
    is read, since all of them may take 24 GB."""
    places = load_npy(folder / _PLACES, np.dtype("<i8"), (3, None))
    found = (load_npy(folder / _LABELS, np.dtype(of), (None,)) for of in ("u1", "<u2", "<u4"))
    labels = next((array for array in found if array is not None), None)
    return (
        None
        if places is None or labels is None or not 0 < len(labels) == places.shape[1]
        else _Index(places, labels)
    )


def _check_labels(archives: _Archives, classes: int) -> None:
    """Raises UserError for a label that is not a class."""
    first = first_outside(archives.labels, classes)
    if first is not None:
        what = f"label {archives.labels[first]} is outside 0..{classes - 1}"
        fix = "correct it, or set data.classes=N (default: the largest label of train plus 1)"
        raise UserError(what, archives.name(first), fix)

"""MNIST, Fashion-MNIST and KMNIST in IDX files; headers and lengths are checked."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.data.files.folders import RequiredFiles, data_root, download
from hvdtrain.data.files.selection import FileSelection, Staging
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import ArraySource, LabelledImages, Split
from hvdtrain.errors import UserError


class _Dataset(NamedTuple):
    """A data set of the MNIST family."""

    folder: str  # the name of torchvision's class and of its folder
    url: str  # for a download by hand
    classes: tuple[str, ...]  # their names


_FAMILY = {
    "mnist": _Dataset(
        "MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist/", tuple("0123456789")
    ),
    "fashion_mnist": _Dataset(
        "FashionMNIST",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
    ),
    "kmnist": _Dataset(
        "KMNIST",
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    ),
}
_FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "val": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CLASSES = 10
_BLOCK_BYTES = 2**20
# limits by number of axes. Images: six times MNIST; labels: each takes eight bytes of memory
_MOST_BYTES = {
    3: 2**28,
    1: 2**24,
}
_DEFLATE_RATIO = 1032  # no gzip stream expands by a larger factor (zlib's technical details)


def _selections(name: str, source: Path) -> tuple[FileSelection, ...]:
    return (
        FileSelection(f"{_FAMILY[name].folder}/raw", "*-ubyte*"),
        FileSelection("", "*-ubyte*"),
    )


STAGING = Staging(selections=_selections)
# samples, shape, classes, as published
TRAINING = dict.fromkeys(_FAMILY, (60000, (28, 28, 1), _CLASSES))


def build(name: str, root: Path | None, split: Split, *, download: bool = True) -> LabelledImages:
    """mnist, fashion_mnist or kmnist: 60000 training and 10000 validation images, 28x28x1, 10
    classes.

    The files are in <root>/<MNIST|FashionMNIST|KMNIST>/raw or in <root> itself, plain or as .gz.
    The default of <root> is $XDG_CACHE_HOME/hvdtrain/data, or ~/.cache/hvdtrain/data.

    download: fetch missing files, by one process on a machine while the others wait (true or false)

    Raises UserError for another name, and if files are missing, damaged or do not belong together.
    """
    if name not in _FAMILY:
        raise OptionError(
            f"{name} is not of the MNIST family", "name", f"one of {', '.join(_FAMILY)}"
        )
    images, labels = _find_or_download(name, data_root(root), split, download)
    x = _read_idx(images, 3)
    y = _read_idx(labels, 1)
    if len(x) != len(y):
        raise UserError(
            f"{len(x)} images but {len(y)} labels",
            f"{images} and {labels}",
            "replace both by one pair that belongs together",
        )
    return ArraySource(
        x[..., None], y.astype(np.int64), _CLASSES, str(images), _FAMILY[name].classes
    )


def _find_or_download(name: str, root: Path, split: Split, allowed: bool) -> list[Path]:
    """Returns the paths of the split's images and labels; a download fetches both splits. Raises
    UserError if files are missing."""
    dataset = _FAMILY[name]
    if not all(_find(root, dataset, file) for file in _FILES[split]):
        absent = [
            f"{dataset.folder}/raw/{file}"
            for files in _FILES.values()
            for file in files
            if not _find(root, dataset, file)
        ]
        fix = (
            f"put them there, from {dataset.url} (.gz as they are), or set data.root to the "
            f"folder that holds {dataset.folder}/raw"
        )
        required = RequiredFiles(name, root, absent, fix)
        if not allowed:
            raise required.missing_error("data.download is false")
        download(required, lambda folder: _download_files(dataset, folder))
    return [path for file in _FILES[split] if (path := _find(root, dataset, file))]


def _find(root: Path, dataset: _Dataset, file: str) -> Path | None:
    paths = (
        folder / f"{file}{suffix}"
        for folder in (root / dataset.folder / "raw", root)
        for suffix in ("", ".gz")
    )
    return next((path for path in paths if path.is_file()), None)


def _download_files(dataset: _Dataset, folder: Path) -> None:
    # torchvision has the URLs and checksums
    getattr(import_torchvision().datasets, dataset.folder)(str(folder), download=True)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads the uint8 array of an IDX file with `dimensions` axes. Raises UserError, before memory
    is allocated, if the length of the file does not match."""
    try:
        with path.open("rb") as raw:
            length = os.fstat(raw.fileno()).st_size
            if path.suffix != ".gz":
                return _parse(raw, length, path, dimensions)
            with gzip.open(raw) as unpacked:
                return _parse(unpacked, length * _DEFLATE_RATIO, path, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise _defect(
            path,
            f"an error: {error}",
            "an IDX file in gzip" if path.suffix == ".gz" else "an IDX file",
        ) from error


def _parse(
    file: IO[bytes] | gzip.GzipFile, capacity: int, path: Path, dimensions: int
) -> np.ndarray:
    """Parses an opened IDX file. `capacity` in bytes is the length of a plain file, and an upper
    bound for the content of a compressed file."""
    compressed = path.suffix == ".gz"
    start = 4 + 4 * dimensions
    header = file.read(start)
    magic = bytes((0, 0, 8, dimensions))  # 8: unsigned bytes
    if header[:4] != magic:
        raise _defect(
            path,
            f"first bytes {header[:4].hex() or 'none'}",
            f"{magic.hex()} (unsigned bytes, {dimensions} dimensions)",
        )
    if len(header) < start:
        raise _defect(path, f"a header of {len(header)} bytes", f"{start}")
    shape = tuple(int(length) for length in np.frombuffer(header, ">u4", offset=4))
    length = math.prod(shape)
    expected = f"{start + length} bytes for the shape {shape} in its header"
    if start + length > capacity or (not compressed and start + length < capacity):
        raise _defect(path, f"{'at most ' if compressed else ''}{capacity} bytes", expected)
    if not 0 < length <= _MOST_BYTES[dimensions]:
        raise _defect(
            path,
            f"{length} bytes in the shape {shape} of its header",
            f"1 to {_MOST_BYTES[dimensions]}",
        )
    body = _read_blocks(file, length + 1)
    if len(body) > length:
        raise _defect(path, f"more than {start + length} bytes", expected)
    if len(body) < length:
        raise _defect(path, f"{start + len(body)} bytes", expected)
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_blocks(file: IO[bytes] | gzip.GzipFile, limit: int) -> bytearray:
    """Reads at most `limit` bytes. Memory grows with the bytes that are read, not with `limit`."""
    body = bytearray()
    while len(body) < limit and (block := file.read(min(_BLOCK_BYTES, limit - len(body)))):
        body += block
    return body


def _defect(path: Path, found: str, expected: str) -> UserError:
    return UserError(
        f"not a valid IDX file: found {found}, expected {expected}",
        str(path),
        "delete the file and fetch it again",
    )

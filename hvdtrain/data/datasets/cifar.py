"""CIFAR-10 and CIFAR-100 in their binary version. The pickled version is never read, because it
could run code."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.data.files.folders import RequiredFiles, data_root, download
from hvdtrain.data.files.selection import FileSelection, Staging
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import ArraySource, LabelledImages, Split
from hvdtrain.errors import UserError

_HOST = "https://www.cs.toronto.edu/~kriz/"
_PIXELS = 3 * 32 * 32
_MOST_BYTES = 2**28  # of a split: CIFAR has 154 million
_FIX = "delete the file and fetch it again"
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle caterpillar
    cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
    house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
    orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose
    sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""  # in the order of fine_label_names.txt  # noqa: E501


class _Edition(NamedTuple):
    """CIFAR-10 or CIFAR-100."""

    archive: str
    md5: str
    folder: str
    files: dict[Split, tuple[str, ...]]
    label_bytes: int  # the last of them is the class
    classes: tuple[str, ...]  # their names
    pickled_folder: str  # the folder of the pickled version, which is not read


_EDITIONS = {
    "cifar10": _Edition(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {
            "train": tuple(f"data_batch_{part}.bin" for part in range(1, 6)),
            "val": ("test_batch.bin",),
        },
        1,
        tuple(_CIFAR10_CLASSES.split()),
        "cifar-10-batches-py",
    ),
    "cifar100": _Edition(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train": ("train.bin",), "val": ("test.bin",)},
        2,
        tuple(_CIFAR100_CLASSES.split()),
        "cifar-100-python",
    ),
}


def _selections(name: str, source: Path) -> tuple[FileSelection, ...]:
    return (FileSelection(_EDITIONS[name].folder, "*.bin"),)


STAGING = Staging(selections=_selections)
# samples, shape, classes, as published
TRAINING = {
    "cifar10": (50_000, (32, 32, 3), 10),
    "cifar100": (50_000, (32, 32, 3), 100),
}


def build(name: str, root: Path | None, split: Split, *, download: bool = True) -> LabelledImages:
    """cifar10, or cifar100 with its 100 fine classes: 50000 training and 10000 validation images,
    32x32x3.

    The files are in <root>/cifar-10-batches-bin or <root>/cifar-100-binary. Without a root:
    $XDG_CACHE_HOME/hvdtrain/data, or ~/.cache/hvdtrain/data.

    download: fetch missing files, by one process on a machine while the others wait (true or false)

    Raises UserError for another name, and if files are missing or damaged.
    """
    if name not in _EDITIONS:
        raise OptionError(
            f"{name} is not a CIFAR data set", "name", f"one of {', '.join(_EDITIONS)}"
        )
    edition = _EDITIONS[name]
    folder = data_root(root) / edition.folder
    paths = [folder / file for file in edition.files[split]]
    if not all(path.is_file() for path in paths):
        _download(name, data_root(root), download)
    records = [
        _read_records(path, edition.label_bytes, _MOST_BYTES // len(paths)) for path in paths
    ]
    # (n, C, H, W)
    x = np.concatenate([record[:, edition.label_bytes :] for record in records]).reshape(
        -1, 3, 32, 32
    )
    y = np.concatenate([record[:, edition.label_bytes - 1] for record in records]).astype(np.int64)
    return ArraySource(
        np.ascontiguousarray(x.transpose(0, 2, 3, 1)),
        y,
        len(edition.classes),
        str(folder),
        edition.classes,
    )


def _download(name: str, root: Path, allowed: bool) -> None:
    """Downloads both splits. Raises UserError if that fails or is not allowed."""
    edition = _EDITIONS[name]
    files = [f"{edition.folder}/{file}" for files in edition.files.values() for file in files]
    required = RequiredFiles(name, root, files, f"unpack {_HOST}{edition.archive} in {root}")
    if (root / edition.pickled_folder).is_dir():
        raise required.missing_error(
            f"{edition.pickled_folder} is not read: it holds pickles, which can run code"
        )
    if not allowed:
        raise required.missing_error("data.download is false")
    download(required, lambda folder: _download_archive(edition, folder))


def _download_archive(edition: _Edition, folder: Path) -> None:
    import_torchvision().datasets.utils.download_and_extract_archive(
        _HOST + edition.archive, str(folder), md5=edition.md5
    )


def _read_records(path: Path, label_bytes: int, most: int) -> np.ndarray:
    """Reads uint8 (n, label bytes + 3072), one row for each image. Raises UserError if the file is
    longer than `most` or does not contain whole records."""
    record = label_bytes + _PIXELS
    try:
        length = path.stat().st_size
        if length == 0 or length % record:
            raise UserError(
                f"found {length} bytes, expected a multiple of {record}, one record for each image",
                str(path),
                _FIX,
            )
        if length > most:
            raise UserError(f"found {length} bytes, expected at most {most}", str(path), _FIX)
        return np.fromfile(path, np.uint8, count=length).reshape(-1, record)
    except OSError as error:
        raise UserError(f"the file cannot be read: {error}", str(path), _FIX) from error

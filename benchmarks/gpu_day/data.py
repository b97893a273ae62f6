"""The data sets of the day: those under --root, and in their places images made from counters, in
the same files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image

from gpu_day.part import Part
from hvdtrain.data.datasets import synthetic
from hvdtrain.data.source import Split

SYNTHETIC = "synthetic"


class Data(NamedTuple):
    """A data set; `name` is "synthetic" if there is none."""

    name: str
    root: Path


def fashion_mnist(part: Part) -> Data:
    """FashionMNIST/raw."""
    raw = Path("FashionMNIST", "raw")
    if part.root and (part.root / raw / "train-images-idx3-ubyte").is_file():
        return Data("Fashion-MNIST", part.root)
    folder = _made(part, "fashion") / raw
    if not folder.exists():
        folder.mkdir(parents=True)
        for name, split, count in _counts(part, 60_000, "train", "t10k"):
            x, y = _images(split, count, (28, 28, 1))
            (folder / f"{name}-images-idx3-ubyte").write_bytes(
                struct.pack(">IIII", 0x803, count, 28, 28) + x.tobytes()
            )
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(
                struct.pack(">II", 0x801, count) + y.tobytes()
            )
    return Data(SYNTHETIC, _made(part, "fashion"))


def cifar10(part: Part) -> Data:
    """cifar-10-batches-bin; or images in train/CLASS and test/CLASS, which a JPEG version has."""
    if part.root and (part.root / "cifar-10-batches-bin").is_dir():
        return Data("CIFAR-10", part.root)
    if part.root and (found := _image_folder(part.root)):
        return Data("CIFAR-10 as JPEG", found)
    folder = _made(part, "cifar10") / "cifar-10-batches-bin"
    if not folder.exists():
        folder.mkdir(parents=True)
        for name, split, count in _counts(part, 50_000, "train", "val"):
            x, y = _images(split, count, (32, 32, 3))
            records = np.concatenate([y[:, None], x.transpose(0, 3, 1, 2).reshape(count, -1)], 1)
            files = (
                [f"data_batch_{number}.bin" for number in range(1, 6)]
                if name == "train"
                else ["test_batch.bin"]
            )
            for file, some in zip(files, np.array_split(records, len(files)), strict=True):
                (folder / file).write_bytes(some.tobytes())
    return Data(SYNTHETIC, folder.parent)


def jpegs(part: Part) -> Data:
    """Small images in train/CLASS."""
    if part.root and (found := _image_folder(part.root)):
        return Data("CIFAR-10 as JPEG", found)
    folder = _made(part, "jpegs")
    if not folder.exists():
        x, y = _images("train", 40 if part.quick else 2000, (32, 32, 3))
        for number, (image, label) in enumerate(zip(x, y, strict=True)):
            path = folder / "train" / f"class{label}" / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(image).save(path, "JPEG", quality=90)
    return Data(SYNTHETIC, folder)


def _image_folder(root: Path) -> Path | None:
    """The root, or a folder in it, that has train/CLASS and test/CLASS."""
    found = (
        path
        for path in (root, *sorted(root.iterdir()))
        if (path / "train").is_dir() and (path / "test").is_dir()
    )
    return next(found, None)


def _made(part: Part, name: str) -> Path:
    return part.home / "data" / name


def _counts(part: Part, train: int, *names: str) -> list[tuple[str, Split, int]]:
    counts = (120, 40) if part.quick else (train, 10_000)
    return [(names[0], "train", counts[0]), (names[1], "val", counts[1])]


def _images(split: Split, count: int, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (n, H, W, C) and (n,): a quarter is the pattern of the class, the rest noise."""
    made = synthetic.build("synthetic", None, split, samples=count, val_samples=count, shape=shape)
    batch = made.read(np.arange(count))
    return batch["x"], batch["y"].astype(np.uint8)

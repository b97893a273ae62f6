"""Hostile data files for the readers of data sets: valid files, and what a broken disk or an
attacker makes of them."""

from __future__ import annotations

import functools
import gzip
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_bytes import NUMBERS, chance, mutated, odd, pick, zeros
from fuzz_images import broken_image, sound_images
from numpy.random import Generator

from hvdtrain.config import plugins
from hvdtrain.data.datasets import cifar, idx
from hvdtrain.data.source import Source

BOMB_BYTES = 2**30
HAS_FOLDERS = "folder" in plugins.files("data/datasets")  # the data set of an extra


@functools.cache
def zeros_in_gzip(head: bytes, room: int) -> bytes:
    """A gzip file of `head` and zeros, `room` bytes in all: 1 MB of file for 1 GiB."""
    length = room - len(head)
    checksum = zlib.crc32(head)
    block = bytes(2**20)
    for _ in range(length // 2**20):
        checksum = zlib.crc32(block, checksum)
    checksum = zlib.crc32(bytes(length % 2**20), checksum)
    # a deflate block as it is
    stored = b"\0" + struct.pack("<HH", len(head), len(head) ^ 0xFFFF) + head
    return (
        bytes.fromhex("1f8b08000000000000ff")
        + stored
        + zeros(length)
        + struct.pack("<II", checksum, room % 2**32)
    )


def idx_file(rng: Generator, lengths: tuple[int, ...]) -> bytes:
    """Sound, or with a header of other or huge lengths."""
    body = rng.integers(0, 10, int(np.prod(lengths)), np.uint8).tobytes()
    if chance(rng, 0.3):
        lengths = tuple(
            pick(rng, (*lengths, *NUMBERS)) for _ in range(pick(rng, (len(lengths), 0, 1, 2, 3, 9)))
        )
    kind = 8 if chance(rng, 0.95) else int(rng.integers(256))
    return bytes((0, 0, kind, len(lengths))) + struct.pack(f">{len(lengths)}I", *lengths) + body


def idx_bomb(rng: Generator, dimensions: int) -> bytes:
    """1 GiB of zeros in 1 MB, with a header that asks for all of them, or for less, or that
    nests."""
    match int(rng.integers(4)):
        case 0 if dimensions == 1:
            return zeros_in_gzip(
                bytes((0, 0, 8, 1)) + struct.pack(">I", BOMB_BYTES - 8), BOMB_BYTES
            )
        case 0:
            return zeros_in_gzip(
                bytes((0, 0, 8, 3)) + struct.pack(">3I", BOMB_BYTES // 16 - 1, 16, 1), BOMB_BYTES
            )
        case 1:
            return zeros_in_gzip(
                bytes((0, 0, 8, dimensions)) + struct.pack(f">{dimensions}I", *[5] * dimensions),
                BOMB_BYTES,
            )
        case 2:
            return gzip.compress(zeros_in_gzip(b"", BOMB_BYTES))
        case _:
            return gzip.compress(b"") * 20000


def read_idx(rng: Generator, home: Path) -> Callable[[], None]:
    """Fashion-MNIST's files of n images, plain or packed."""
    count = int(rng.integers(1, 6))
    suffix = pick(rng, ("", ".gz"))
    for name, lengths in (("images-idx3", (count, 4, 3)), ("labels-idx1", (count,))):
        path = home / f"train-{name}-ubyte{suffix}"
        data = idx_file(rng, lengths)
        if suffix:
            data = idx_bomb(rng, len(lengths)) if chance(rng, 0.03) else gzip.compress(data)
        path.write_bytes(mutated(rng, data) if chance(rng, 0.4) else data)
        if chance(rng, 0.05):
            odd(rng, path)
    return lambda: check_source(idx.build("fashion_mnist", home, "train", download=False))


def read_cifar(rng: Generator, home: Path) -> Callable[[], None]:
    """Every file of both editions."""
    name, classes, labels = pick(rng, (("cifar10", 10, 1), ("cifar100", 100, 2)))
    edition = home / {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[name]
    edition.mkdir()
    files = (
        "train.bin",
        "test.bin",
        "test_batch.bin",
        *(f"data_batch_{part}.bin" for part in range(1, 6)),
    )
    for file in files:
        top = classes if chance(rng, 0.9) else 256
        records = [
            rng.integers(0, top, labels, np.uint8).tobytes() + rng.bytes(3072)
            for _ in range(int(rng.integers(1, 4)))
        ]
        data = b"".join(records)
        (edition / file).write_bytes(mutated(rng, data) if chance(rng, 0.1) else data)
        if chance(rng, 0.05):
            odd(rng, edition / file)
    split = pick(rng, ("train", "val"))
    return lambda: check_source(cifar.build(name, home, split, download=False))


NAMES = (
    b"a.png",
    b"\xff\xfe.png",
    b"new\nline.jpg",
    b"-rf.png",
    b"x" * 250 + b".png",
    b"a b.PNG",
    "é\u202e.bmp".encode(),
    b".hidden.png",
)


def read_folder(rng: Generator, home: Path) -> Callable[[], None]:
    """Two classes of up to four images, one of them harmed, under odd names."""
    labels = (b"ant", pick(rng, (b"bee", b"\xe9", b"b\nc", b"..x")))
    for split in ("train", "val"):
        for label in (labels[0], labels[1] if chance(rng, 0.95) else b"odd"):
            place = os.path.join(os.fsencode(home), split.encode(), label)
            os.makedirs(place)
            for number in range(int(rng.integers(1, 4))):
                path = Path(
                    os.fsdecode(
                        os.path.join(
                            place, pick(rng, NAMES) if chance(rng, 0.2) else b"%d.png" % number
                        )
                    )
                )
                path.write_bytes(
                    broken_image(rng) if chance(rng, 0.1) else pick(rng, sound_images()[:18])
                )
                if chance(rng, 0.02):
                    odd(rng, path)
    folder: Any = plugins.load("data/datasets", "folder", "here")
    size = (
        pick(rng, (None, None, 1, 16, 33, 257))
        if chance(rng, 0.9)
        else pick(rng, (-1, 0, 2**12, 10**6, 2**31, 2**63))
    )
    split = pick(rng, ("train", "val"))
    channels = pick(rng, (1, 3))
    return lambda: check_source(
        folder.build("folder", home, split, size=size, channels=channels, cache=home / "cache")
    )


def read_cache(rng: Generator, home: Path) -> Callable[[], None]:
    """A sound folder whose cached array was harmed."""
    (home / "train" / "a").mkdir(parents=True)
    (home / "train" / "a" / "1.png").write_bytes(sound_images()[2])
    folder: Any = plugins.load("data/datasets", "folder", "here")
    check_source(folder.build("folder", home, "train", cache=home / "cache"))
    kept = next((home / "cache").glob("*/images.npy"))
    data = kept.read_bytes()
    for word, other in (
        (b"|u1", pick(rng, (b"|O", b"V9", b">f8"))),
        (b"16", pick(rng, (b"1e", b"-9", b"()"))),
    ):
        data = data.replace(word, other) if chance(rng, 0.2) else data
    kept.write_bytes(data if chance(rng, 0.3) else mutated(rng, data))
    if chance(rng, 0.2):
        odd(rng, kept)
    for other in ("images.part", ".hvdtrain.lock"):  # what the reader itself would write
        if chance(rng, 0.05):
            odd(rng, kept.with_name(other))
    return lambda: check_source(folder.build("folder", home, "train", cache=home / "cache"))


def check_source(source: Source) -> None:
    """What was read is what a trainer may rely on."""
    height, width, channels = source.shape
    last = len(source) - 1
    batch = source.read(np.unique([0, last // 2, last]))
    assert batch["x"].dtype == np.uint8 and batch["x"].shape == (
        len(batch["y"]),
        height,
        width,
        channels,
    ), batch["x"].shape
    assert (
        batch["y"].dtype == np.int64 and min(batch["y"]) >= 0 and max(batch["y"]) < source.classes
    ), batch["y"]
    if len(source) * height * width * channels < 2**22:
        mean, deviation = source.stats()
        assert (
            np.isfinite([mean, deviation]).all()
            and (deviation > 0).all()
            and (mean >= 0).all()
            and (mean <= 1).all()
        ), (mean, deviation)

"""Data files at which a reader once failed in a fuzz run: each is a UserError now."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_files import zeros_in_gzip
from fuzz_images import png_of, rle_bmp, sound_images

from hvdtrain.data.datasets import cifar, idx, synthetic
from hvdtrain.data.files import folders
from hvdtrain.data.source import Split
from hvdtrain.errors import UserError
from hvdtrain.extras.image_files.data.datasets import folder


def refusal(name: str, root: Path, split: Split = "train", size: int | None = None) -> str:
    makers: dict[str, Callable[[], object]] = {
        "fashion_mnist": lambda: idx.build(name, root, split, download=False),
        "cifar10": lambda: cifar.build(name, root, split, download=False),
        "folder": lambda: folder.build(name, root, split, size=size, cache=root / "cache"),
    }
    with pytest.raises(UserError) as caught:
        makers[name]()
    return str(caught.value)


def images_and_labels(root: Path, images: bytes, labels: bytes, suffix: str = ".gz") -> None:
    (root / f"train-images-idx3-ubyte{suffix}").write_bytes(images)
    (root / f"train-labels-idx1-ubyte{suffix}").write_bytes(labels)


def test_a_gzip_bomb(tmp_path: Path) -> None:
    images = bytes.fromhex("00000803") + struct.pack(">3I", 2**26 - 1, 16, 1)
    labels = bytes.fromhex("00000801") + struct.pack(">I", 2**30 - 8)
    images_and_labels(tmp_path, zeros_in_gzip(images, 2**30), zeros_in_gzip(labels, 2**30))
    assert (
        "found 1073741808 bytes in the shape (67108863, 16, 1) of its header, expected 1 to "
        "268435456" in refusal("fashion_mnist", tmp_path)
    )
    images_and_labels(
        tmp_path,
        gzip.compress(images[:4] + struct.pack(">3I", 1, 1, 1) + b"x"),
        zeros_in_gzip(labels, 2**30),
    )
    assert (
        "found 1073741816 bytes in the shape (1073741816,) of its header, expected 1 to 16777216"
        in refusal("fashion_mnist", tmp_path)
    )


def test_a_header_of_no_images_of_a_huge_size(tmp_path: Path) -> None:
    images_and_labels(tmp_path, bytes.fromhex("00000803 00000000 ffffffff ffffffff"), b"", "")
    assert (
        "found 0 bytes in the shape (0, 4294967295, 4294967295) of its header, expected 1 to"
        in refusal("fashion_mnist", tmp_path)
    )


def test_a_sparse_file(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").open("wb") as file:
        file.truncate(3073 * 10**6)
    assert "found 3073000000 bytes, expected at most 268435456" in refusal(
        "cifar10", tmp_path, "val"
    )
    image = place(tmp_path, b"", "train/a/1.png")
    with image.open("wb") as file:
        file.truncate(2**33)
    assert (
        f"the image is a file of 8589934592 bytes, at most 134217728\n  where: {image}"
        in refusal("folder", tmp_path)
    )


def place(root: Path, data: bytes, *paths: str) -> Path:
    """Writes the same file to all paths; the last of them."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root / paths[-1]


def many_scans(frame: bytes) -> bytes:
    """A JPEG file with its last scan 201 times."""
    data = next(
        image for image in sound_images() if image.startswith(b"\xff\xd8") and frame in image
    )
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 200 + data[-2:]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (many_scans(b"\xff\xc2"), "scans, at most 100"),
        (many_scans(b"\xff\xc0"), "scans, at most 100"),
        (rle_bmp(60000, 1000), "the image is a BMP file with run-length encoding"),
        (png_of(8193, 8193), "Image size (67125249 pixels) exceeds limit of 67108864 pixels"),
        (png_of(16, 16, 16), "the image has more than 8 bits a channel"),
    ],
    ids=["scans", "scans, baseline", "rle", "pixels", "bits"],
)
@pytest.mark.parametrize("second", [False, True])
def test_images_that_are_slow_to_decode_are_errors(
    tmp_path: Path, data: bytes, what: str, second: bool
) -> None:
    image = place(tmp_path, data, "train/a/2.png")
    if second:
        place(tmp_path, png_of(16, 16), "train/a/1.png")
    output = refusal("folder", tmp_path, size=8)
    assert what in output and f"where: {image}" in output


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    image = place(tmp_path, png_of(4, 4), "val/a/1.png", "val/a/2.png", "train/a/1.png")
    image.unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(image)  # train's first one, whose size is asked for by val too
        for split in ("train", "val"):
            assert (
                f"the image is not a regular file\n  where: {image}\n  fix: remove it"
                in refusal("folder", tmp_path, split)
            )
        image.unlink()
    os.mkfifo(place(tmp_path, png_of(4, 4), "train/a/1.png").with_name("2.png"))
    assert f"where: {tmp_path}/train/a/2.png" in refusal("folder", tmp_path)


def test_a_huge_size_is_an_error(tmp_path: Path) -> None:
    place(tmp_path, png_of(4, 4), "train/a/1.png")
    assert "images of size 1000000 with 3 channels are impossible" in refusal(
        "folder", tmp_path, size=10**6
    )
    assert "data.size is 1 to 8192" in refusal("folder", tmp_path, size=2**63)


def test_a_file_in_the_cache_that_is_no_array(tmp_path: Path) -> None:
    place(tmp_path, png_of(4, 4), "train/a/1.png")
    outside = place(tmp_path, b"mine", "outside")
    for _ in range(4):
        assert folder.build("folder", tmp_path, "train", cache=tmp_path / "cache").shape == (
            4,
            4,
            3,
        )
        kept = next((tmp_path / "cache").glob("*/images.npy"))
        if _ == 0:
            kept.write_bytes(kept.read_bytes().replace(b"}", b"("))  # tokenize.TokenError
        else:
            kept.unlink()
            kept.with_name("images.part").symlink_to(outside) if _ == 1 else os.mkfifo(kept)
    assert outside.read_bytes() == b"mine"


def test_synthetic_images_of_a_huge_size_are_errors() -> None:
    for options, what in (
        (
            {"samples": 2**62},
            f"{2**62} is too large, at most {2**40} is possible\n  where: samples",
        ),
        (
            {"classes": 2**62},
            f"{2**62} is too large, at most {2**20} is possible\n  where: classes",
        ),
        (
            {"shape": (60000, 60000, 3)},
            f"images of {60000 * 60000 * 3} values are too large, at most {2**26}\n  where: shape",
        ),
    ):
        with pytest.raises(UserError) as caught:
            synthetic.build("synthetic", None, "train", **options)
        assert what in str(caught.value)


def test_a_home_folder_of_an_unknown_user() -> None:
    for make in (
        lambda: folders.data_root(Path("~nobodyhere/x")),
        lambda: folder.build("folder", Path("~nobodyhere"), "train"),
    ):
        with pytest.raises(
            UserError,
            match="cannot find the folder ~nobodyhere.*: Could not determine home directory.\n  "
            "where: root",
        ):
            make()

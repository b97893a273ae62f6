"""CIFAR's binary records; pickles are never read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.datasets import cifar
from hvdtrain.data.source import Split
from hvdtrain.errors import UserError


def planes(value: int) -> bytes:
    """An image in the file's order, red, green and blue plane; every pixel of the 32x32 differs
    from its neighbours."""
    return bytes(
        (value + 40 * channel + row * 3 + column) % 256
        for channel in range(3)
        for row in range(32)
        for column in range(32)
    )


def pixel(value: int, row: int, column: int) -> list[int]:
    return [(value + 40 * channel + row * 3 + column) % 256 for channel in range(3)]


def write_cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for part in range(1, 6):
        records = [bytes([part]) + planes(part), bytes([part + 1]) + planes(part + 100)]
        (folder / f"data_batch_{part}.bin").write_bytes(b"".join(records))
    (folder / "test_batch.bin").write_bytes(bytes([9]) + planes(77))


def refusal(name: str, root: Path, split: Split = "train") -> str:
    with pytest.raises(UserError) as caught:
        cifar.build(name, root, split, download=False)
    return str(caught.value)


def test_cifar10_joins_its_five_files(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    train = cifar.build("cifar10", tmp_path, "train")
    assert (len(train), train.shape, train.classes) == (10, (32, 32, 3), 10)
    batch = train.read(np.array([0, 1, 9]))
    assert batch["y"].tolist() == [1, 2, 6] and batch["y"].dtype == np.int64
    for image, value in zip(batch["x"], [1, 101, 105], strict=True):
        for row, column in [(0, 0), (0, 31), (31, 0), (5, 17)]:
            assert image[row, column].tolist() == pixel(value, row, column)
    val = cifar.build("cifar10", tmp_path, "val").read(np.array([0]))
    assert val["y"].tolist() == [9] and val["x"][0, 1, 2].tolist() == pixel(77, 1, 2)


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes([19, 99]) + planes(3) + bytes([4, 55]) + planes(4))
    (folder / "test.bin").write_bytes(bytes([1, 2]) + planes(5))
    train = cifar.build("cifar100", tmp_path, "train")
    val = cifar.build("cifar100", tmp_path, "val")
    assert (len(train), len(val), train.classes) == (2, 1, 100)
    batch = train.read(np.array([1, 0]))
    assert batch["y"].tolist() == [55, 99] and batch["x"][0, 2, 3].tolist() == pixel(4, 2, 3)
    assert val.read(np.array([0]))["y"].tolist() == [2]


@pytest.mark.parametrize("length", [0, 1, 3072, 3074, 2 * 3073 - 1])
def test_a_file_of_another_length(tmp_path: Path, length: int) -> None:
    write_cifar10(tmp_path)
    broken = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    broken.write_bytes(bytes(length))
    output = refusal("cifar10", tmp_path)
    assert f"found {length} bytes, expected a multiple of 3073, one record for each image" in output
    assert f"where: {broken}" in output and "fix: delete the file and fetch it again" in output
    assert cifar.build("cifar10", tmp_path, "val")  # the other split does not read it


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").chmod(0)
    assert "the file cannot be read: [Errno 13] Permission denied" in refusal(
        "cifar10", tmp_path, "val"
    )


def test_a_label_outside_the_classes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes([100, 100]) + planes(3))
    (folder / "test.bin").write_bytes(bytes(3074))
    assert "label 100 of sample 0 is outside 0..99" in refusal("cifar100", tmp_path)


def test_missing_files_name_the_archive(tmp_path: Path) -> None:
    output = refusal("cifar10", tmp_path / "none")
    assert "the files of cifar10 are missing, and data.download is false" in output
    assert (
        f"where: {tmp_path / 'none'}: cifar-10-batches-bin/data_batch_1.bin, "
        "cifar-10-batches-bin/data_batch_2.bin" in output
    )
    assert (
        "fix: unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz in "
        f"{tmp_path / 'none'}" in output
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")]
)
@pytest.mark.parametrize("allowed", [True, False])
def test_the_pickled_version_is_not_read(
    tmp_path: Path, name: str, folder: str, allowed: bool
) -> None:
    (tmp_path / folder).mkdir()
    with pytest.raises(UserError) as caught:
        cifar.build(name, tmp_path, "train", download=allowed)
    assert f"{folder} is not read: it holds pickles, which can run code" in str(caught.value)
    assert "-binary.tar.gz in" in str(caught.value)


def test_an_unknown_edition(tmp_path: Path) -> None:
    assert "cifar11 is not a CIFAR data set" in refusal("cifar11", tmp_path)
    assert "fix: one of cifar10, cifar100" in refusal("cifar11", tmp_path)

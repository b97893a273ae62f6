"""Arrays as a safetensors file: what the safetensors library reads back, the checksum, and the
memory that it takes."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from hvdtrain.training.checkpoint import array_file
from hvdtrain.training.checkpoint.array_file import write_arrays

TYPES = "f8 f4 f2 i8 u8 i4 u4 i2 u2 i1 u1 ? c8"


def test_the_library_reads_what_is_written_and_the_checksum_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_file, "PIECE_BYTES", 100)  # most arrays are written in several pieces
    numbers = np.random.default_rng(1).integers(0, 256, 2 * 3 * 5 * 8, np.uint8).tobytes()
    arrays = {
        f"a.{name}": np.frombuffer(numbers, "u1").astype(name).reshape(-1, 3, 5)
        for name in TYPES.split()
    }
    arrays |= {
        "zero": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "\u65e5": np.ones(1, np.float64),
    }
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays |= {
        "columns": np.asfortranarray(strided),
        "every second": strided[::2, ::-1],
        "high byte first": strided.astype(">f4"),
    }
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        checksum = write_arrays(file, arrays, {"model": "x"})
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype.newbyteorder("="), name
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=array.dtype.isnative)
    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"model": "x"}
    with path.open("wb") as file:
        write_arrays(file, {})
    assert load_file(path) == {}


def test_numbers_that_the_format_lacks_are_refused(tmp_path: Path) -> None:
    with (
        (tmp_path / "x").open("wb") as file,
        pytest.raises(ValueError, match="a.b has numbers of type complex128, which"),
    ):
        write_arrays(file, {"a.b": np.zeros(1, complex)})


def test_no_second_copy_of_the_arrays_is_made(tmp_path: Path) -> None:
    arrays = {f"{number}": np.ones(2**20, np.float32) for number in range(8)}  # 4 MiB each
    with (tmp_path / "x").open("wb") as file:
        tracemalloc.start()
        write_arrays(file, arrays)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most_bytes < 2**20

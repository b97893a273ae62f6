"""Scientific data files that lead elsewhere, run code, or claim too much: one message, before
anything is opened or allocated."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hvdtrain.core.folder import WrongKind, check_regular
from hvdtrain.data.datasets import text
from hvdtrain.data.user_data.arrays import read_safetensors
from hvdtrain.errors import UserError
from hvdtrain.extras.predict.data_file import read_data_file
from hvdtrain.extras.science.data.datasets import csv, npz, parquet
from hvdtrain.extras.science.user_tables.predicted_table import read_numbers

BUILDS: dict[str, Callable[..., Any]] = {
    "npz": npz.build,
    "csv": csv.build,
    "parquet": parquet.build,
}
SUFFIXES = {"npz": ".npz", "csv": ".csv", "parquet": ".parquet"}


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.where and caught.value.fix
    return caught.value.what


def read(name: str, path: Path, **options: Any) -> dict[str, np.ndarray]:
    source = BUILDS[name](name, path, "train", **options)
    found: dict[str, np.ndarray] = source.read(np.arange(len(source)))
    return found


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_not_a_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    make = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": os.mkdir,
    }[kind]
    for name, suffix in [*SUFFIXES.items(), ("text", ".txt"), ("safetensors", ".safetensors")]:
        make(path := tmp_path / f"t{suffix}")
        with pytest.raises(WrongKind, match=f"a {kind}, not a file"):
            check_regular(path)
        if (name, kind) == ("text", "folder"):
            continue  # with train.txt
        if name == "safetensors":
            found = error_of(lambda path=path: read_safetensors(path, "data", "train_data"))
        else:
            found = error_of(
                lambda name=name, path=path: (BUILDS | {"text": text.build})[name](
                    name, path, "train"
                )
            )
        assert f"a {kind}, not a file" in found


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("shape", [(-8,), (-2, -4), (10**12,), (2**62, 4)])
def test_headers_of_npz_with_other_shapes_than_the_file_has(
    shape: tuple[int, ...], kind: int, tmp_path: Path
) -> None:
    def member(of: tuple[int, ...]) -> bytes:
        np.lib.format.write_array_header_1_0(
            out := io.BytesIO(), {"descr": "<f8", "fortran_order": False, "shape": of}
        )
        return out.getvalue() + bytes(64)

    with zipfile.ZipFile(tmp_path / "t.npz", "w", kind) as archive:
        archive.writestr("x.npy", member(shape))
        archive.writestr("y.npy", member((8,)))
    assert "cut off or damaged" in error_of(lambda: read("npz", tmp_path / "t.npz"))
    assert "cut off or damaged" in error_of(
        lambda: read("npz", tmp_path / "t.npz", fields={"x": "y", "y": "y"}, split_by="x")
    )


@pytest.mark.parametrize(
    ("word", "input_", "label"),
    [
        ("1_000", "could not convert '1_000'", "could not convert '1_000'"),
        ("0x10", "could not convert '0x10'", "could not convert '0x10'"),
        ("٣", "could not convert '٣'", "could not convert '٣'"),
        ("1e400", "is outside the range of float64", "is outside the range of float64"),
        (
            "1" * 400,
            "(400 characters) is outside the range of float64",
            "(400 characters) is outside the range of int64",
        ),
        (
            "12345678901234567890",
            "loses digits as a float64, 12345678901234567168",
            "is outside the range of int64",
        ),
        ("9007199254740993", "loses digits as a float64, 9007199254740992", None),
        ("-9223372036854775808", None, None),
        ("+7", None, None),
        ("inf", "has inf, expected a finite number", "has inf, expected a finite number"),
        ("NaN", "has nan, expected a finite number", "has nan, expected a finite number"),
    ],
)
def test_what_a_number_is(word: str, input_: str | None, label: str | None, tmp_path: Path) -> None:
    """The same for inputs, labels and hvdtrain predict."""
    for line, expected in ((f"{word},2,1", input_), (f"1,2,{word}", label)):
        (tmp_path / "t.csv").write_text(f"a,b,y\n1,2,0\n{line}\n", encoding="utf-8")
        if expected is not None:
            assert expected in error_of(lambda: read("csv", tmp_path / "t.csv"))
        else:
            found = read("csv", tmp_path / "t.csv")
            assert int(found["x"][1, 0] if line.startswith(word) else found["y"][1]) == int(word)
    (tmp_path / "p.csv").write_text(f"a\n1\n{word}\n", encoding="utf-8")
    if word in ("1_000", "0x10", "٣", "1e400"):
        assert "expected a number" in error_of(lambda: read_numbers(tmp_path / "p.csv", {}))


def test_a_line_without_an_end(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("wb") as file:
        file.write(b"a,y\n1,2\n")
        file.truncate(2**26 + 100)
    assert "a line from here on has more than 67,108,864 bytes" in error_of(
        lambda: read("csv", tmp_path / "t.csv")
    )


def test_row_groups_that_unpack_to_more_than_the_cache(tmp_path: Path) -> None:
    """A dictionary of few bytes in the file, and very many rows that a few bytes stand for."""
    words = pyarrow.array([f"{number:04}" + "a" * 2**16 for number in range(100)])  # 6.5 MB
    table = pyarrow.table({"x": np.zeros(100), "y": np.zeros(100, np.int64), "word": words})
    pyarrow.parquet.write_table(table, tmp_path / "words.parquet", compression="zstd")
    assert (tmp_path / "words.parquet").stat().st_size < 10**5
    fields = {"x": "x", "y": "y"}
    assert len(read("parquet", tmp_path / "words.parquet", fields=fields, cache_mb=1)["x"]) == 100
    found = error_of(
        lambda: read(
            "parquet",
            tmp_path / "words.parquet",
            fields=fields,
            cache_mb=1,
            split_by="word",
            split_val=["a"],
        )
    )
    assert "word of row group 0 takes 7 MB in memory, at most 4" in found
    rows = pyarrow.table({"x": np.zeros(10**6), "y": np.zeros(10**6, np.int64)})
    pyarrow.parquet.write_table(rows, tmp_path / "rows.parquet")
    assert "x of row group 0 takes 8 MB in memory, at most 4" in error_of(
        lambda: read("parquet", tmp_path / "rows.parquet", cache_mb=1)
    )


@pytest.mark.parametrize("shape", [(-8,), (10**12,), (2**62, 4)])
def test_headers_of_files_to_predict(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.lib.format.write_array_header_1_0(
        out := io.BytesIO(), {"descr": "<f8", "fortran_order": False, "shape": shape}
    )
    (tmp_path / "t.npy").write_bytes(out.getvalue() + bytes(64))
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", out.getvalue() + bytes(64))
    assert "cannot be read" in error_of(lambda: read_data_file(tmp_path / "t.npy"))
    assert "cut off or damaged" in error_of(lambda: read_data_file(tmp_path / "t.npz"))

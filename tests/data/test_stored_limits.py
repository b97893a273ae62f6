"""Files of science that lead elsewhere, run code, or claim more than they have: one message, before
anything is opened or allocated."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zarr as zarr_library

from hvdtrain.cli.evaluate.predict import read_data_file, read_table
from hvdtrain.core.folder import WrongKind, check_regular
from hvdtrain.data.datasets import csv, hdf5, npz, parquet, text, zarr
from hvdtrain.data.own.arrays import read_safetensors
from hvdtrain.errors import UserError

BUILDS: dict[str, Callable[..., Any]] = {
    "hdf5": hdf5.build,
    "zarr": zarr.build,
    "npz": npz.build,
    "csv": csv.build,
    "parquet": parquet.build,
}
SUFFIXES = {"hdf5": ".h5", "zarr": ".zarr.zip", "npz": ".npz", "csv": ".csv", "parquet": ".parquet"}


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
        if (name, kind) in (("text", "folder"), ("zarr", "folder")):
            continue  # a folder with train.txt; a group
        if name == "safetensors":
            found = error_of(lambda path=path: read_safetensors(path, "data", "train_data"))
        else:
            found = error_of(
                lambda name=name, path=path: (BUILDS | {"text": text.build})[name](
                    name, path, "train"
                )
            )
        assert f"a {kind}, not a file" in found


def test_links_of_hdf5_are_not_followed_to_other_files(tmp_path: Path) -> None:
    """A pipe would never answer, and the library does not let a signal end its waiting."""
    os.mkfifo(pipe := tmp_path / "pipe.h5")
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["y"] = np.zeros(4)
        file["g/x"] = np.arange(4.0)
        file.update(
            {
                "soft": h5py.SoftLink("/g/x"),
                "g/near": h5py.SoftLink("x"),
                "dangling": h5py.SoftLink("/nothing"),
            }
        )
        file.update({"circle": h5py.SoftLink("/other"), "other": h5py.SoftLink("circle")})
        file.update(
            {
                "away": h5py.ExternalLink(str(pipe), "/x"),
                "g/away": h5py.ExternalLink(str(pipe), "/"),
                "g/by": h5py.SoftLink("away/x"),
            }
        )
        layout = h5py.VirtualLayout(shape=(4,), dtype="f8")
        layout[:] = h5py.VirtualSource(str(pipe), "x", shape=(4,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", shape=(4,), dtype="f8", external=[(str(pipe), 0, 32)])

    def of(x: str) -> list[float]:
        return read("hdf5", tmp_path / "t.h5", fields={"x": x, "y": "/y"})["x"].tolist()

    assert of("soft") == of("/g/near") == of("g//x") == [0, 1, 2, 3]
    for name, link in {"away": "away", "g/away/x": "away", "/g/by": "away"}.items():
        found = error_of(lambda name=name: of(name))
        assert (
            f"the numbers of {name} are in another file, {str(pipe)[:100]} by the link {link}"
            in found
        )
    for name in ("virtual", "raw"):
        assert f"the numbers of {name} are in another file, to which" in error_of(
            lambda name=name: of(name)
        )
    assert "the links of circle lead to each other" in error_of(lambda: of("circle"))
    assert "the file has no dangling; it has /g/x, /y" in error_of(lambda: of("dangling"))


@pytest.mark.parametrize("file", ["zarr.json", "x/zarr.json", "x/c/0"])
def test_a_pipe_in_a_group_of_zarr_is_not_opened(file: str, tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=3)
    for name in ("x", "y"):
        group.create_array(name, data=np.arange(4.0))
    (tmp_path / "t.zarr" / file).unlink()
    os.mkfifo(tmp_path / "t.zarr" / file)
    assert "a pipe, not a file" in error_of(lambda: read("zarr", tmp_path / "t.zarr"))


def test_links_in_a_group_of_zarr_stay_inside_of_it(tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=3)
    for name in ("x", "y"):
        group.create_array(name, data=np.arange(4.0))
    chunk = tmp_path / "t.zarr/x/c/0"
    chunk.rename(tmp_path / "outside")
    chunk.symlink_to("../../y/c/0")
    (tmp_path / "link.zarr").symlink_to("t.zarr")
    assert read("zarr", tmp_path / "link.zarr")["x"].tolist() == [0, 1, 2, 3]
    chunk.unlink()
    chunk.symlink_to(tmp_path / "outside")
    assert "a link out of the folder of the group: 'x/c/0'" in error_of(
        lambda: read("zarr", tmp_path / "t.zarr")
    )


@pytest.mark.parametrize("version", [2, 3])
def test_codecs_of_zarr_are_known_by_name_before_a_chunk_is_read(
    version: int, tmp_path: Path
) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=version)
    for name in ("x", "y", "part"):
        more = {"shards": (4,)} if version == 3 else {}
        group.create_array(name, shape=(4,), chunks=(2,), dtype="i4", **more)[:] = np.arange(4)
    options = {"fields": {"x": "x", "y": "y"}, "split_by": "part", "split_val": [0]}
    assert len(read("zarr", tmp_path / "t.zarr", **options)["x"]) == 3
    for name in ("x", "part"):
        path = tmp_path / "t.zarr" / name / (".zarray" if version == 2 else "zarr.json")
        sound = path.read_text()
        described = json.loads(sound)
        if version == 2:
            described["filters"] = [{"id": "delta", "dtype": "<i4"}, {"id": "pickle"}]
        else:
            described["codecs"][0]["configuration"]["codecs"].append(
                {"name": "numcodecs.pickle", "configuration": {}}
            )
        path.write_text(json.dumps(described))
        assert "pickle" in error_of(lambda: read("zarr", tmp_path / "t.zarr", **options))
        path.write_text(sound)


@pytest.mark.parametrize("library", ["hdf5", "zarr"])
@pytest.mark.parametrize(
    ("shape", "chunks", "what"),
    [
        ((10**12,), (1,), "at most 2,147,483,648 along each axis"),
        ((4, 10**12), (1, 10**6), "at most 2,147,483,648 along each axis"),
        (
            (2**30, 4),
            (1, 1),
            "is stored in 4,294,967,296 chunks of shape (1, 1), at most 33,554,432",
        ),
        ((4, 2**30), (1, 2**20), "the arrays do not have the same samples"),
    ],
)
def test_impossible_shapes(
    library: str, shape: tuple[int, ...], chunks: tuple[int, ...], what: str, tmp_path: Path
) -> None:
    path = tmp_path / ("t.h5" if library == "hdf5" else "t.zarr")
    file = (
        h5py.File(path, "w") if library == "hdf5" else zarr_library.open_group(str(path), mode="w")
    )
    create = file.create_dataset if library == "hdf5" else file.create_array
    create("x", shape=shape, chunks=chunks, dtype="f4")
    create("y", shape=(3,), chunks=(3,), dtype="f4")
    if library == "hdf5":
        file.close()
    assert what in error_of(lambda: read(library, path))


@pytest.mark.parametrize("attributes", [[], "", 3, [1], {"_ARRAY_DIMENSIONS": 5}])
def test_attributes_of_zarr_that_are_none(attributes: object, tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=2)
    for name in ("x", "y"):
        group.create_array(name, data=np.arange(4.0))
    (tmp_path / "t.zarr/x/.zattrs").write_text(json.dumps(attributes))
    if isinstance(attributes, dict):
        assert read("zarr", tmp_path / "t.zarr")["x"].tolist() == [0, 1, 2, 3]
    else:
        assert "cut off or damaged" in error_of(lambda: read("zarr", tmp_path / "t.zarr"))
        assert "cut off or damaged" in error_of(
            lambda: read("zarr", tmp_path / "t.zarr", fields={"x": "x", "y": "y"})
        )


def test_chunks_larger_than_their_array(tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w")
    group.create_array("x", shape=(4, 8), chunks=(2**20, 2**11), dtype="f4")
    group.create_array("y", shape=(4,), chunks=(9,), dtype="f4")
    assert "x has chunks of shape (1048576, 2048), at most 4,294,967,296 bytes" in error_of(
        lambda: read("zarr", tmp_path / "t.zarr")
    )


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_of_size_0(version: int, tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=version)
    for name in ("x", "y"):
        group.create_array(name, data=np.arange(4.0))
        path = tmp_path / "t.zarr" / name / (".zarray" if version == 2 else "zarr.json")
        described = json.loads(path.read_text())
        where = described if version == 2 else described["chunk_grid"]["configuration"]
        where["chunks" if version == 2 else "chunk_shape"] = [0]
        path.write_text(json.dumps(described))
    assert "x has chunks of shape (0,)" in error_of(lambda: read("zarr", tmp_path / "t.zarr"))


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
        ("1e400", "is beyond the numbers of float64", "is beyond the numbers of float64"),
        (
            "1" * 400,
            "(400 characters) is beyond the numbers of float64",
            "(400 characters) is beyond the numbers of int64",
        ),
        (
            "12345678901234567890",
            "loses digits as a float64, 12345678901234567168",
            "is beyond the numbers of int64",
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
        assert "expected a number" in error_of(lambda: read_table(tmp_path / "p.csv"))


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

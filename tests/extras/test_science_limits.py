"""Files of HDF5 and Zarr that lead elsewhere, run code, or claim more than they have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr as zarr_library

from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import hdf5, zarr

BUILDS: dict[str, Callable[..., Any]] = {"hdf5": hdf5.build, "zarr": zarr.build}


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
    for name, suffix in {"hdf5": ".h5", "zarr": ".zarr.zip"}.items():
        make(path := tmp_path / f"t{suffix}")
        if (name, kind) != ("zarr", "folder"):  # a group
            found = error_of(lambda name=name, path=path: BUILDS[name](name, path, "train"))
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
        where = f"{str(pipe)[:100]} by the link {link}"
        assert f"{name} is only a link: its numbers are in another file, {where}" in found
    for name in ("virtual", "raw"):
        assert f"{name} is only a link: its numbers are in another file" in error_of(
            lambda name=name: of(name)
        )
    assert "the links of circle form a circle" in error_of(lambda: of("circle"))
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

"""HDF5 and Zarr give the samples, and train the weights, that arrays in memory do."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_data
from ranks import needs_extra

import hvdtrain
from hvdtrain.config.read import configure
from hvdtrain.config.words_of_other_tools import data_of_path
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import hdf5, zarr
from hvdtrain.extras.science.stored.cache import BlockCache
from hvdtrain.extras.science.stored.source import StoredSource
from hvdtrain.training.datasets import build_source

needs_h5py = pytest.mark.skipif(
    not importlib.util.find_spec("h5py"), reason="h5py is not installed"
)
needs_zarr = pytest.mark.skipif(
    not importlib.util.find_spec("zarr"), reason="zarr is not installed"
)
FORMATS = [pytest.param("hdf5", marks=needs_h5py), pytest.param("zarr", marks=needs_zarr)]
RANDOM = np.random.default_rng(3)
U = RANDOM.normal(size=(101, 6, 5, 4)).astype("f4")
LABELS = RANDOM.integers(0, 5, 101).astype(">i2")
DRAWN = RANDOM.integers(0, 101, 40)


def stored(source: Source) -> StoredSource:
    found = array_files_in(source)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_job_on_files_trains_the_weights_of_a_job_on_arrays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, also where it stops in the middle of an epoch and goes on."""
    monkeypatch.chdir(tmp_path)
    stored_data.write(tmp_path, name)
    expected = stored_data.bits(stored_data.weights(None, "arrays"))
    assert stored_data.bits(stored_data.weights(name, "files")) == expected
    stored_data.weights(name, "stopped", "stop.steps=5")
    resumed = hvdtrain.train("resume=stopped", "stop.steps=null", "data.readers=2")
    assert stored_data.bits(resumed.weights) == expected


def of_hdf5(path: Path) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        file["plain"], file["labels"] = U, LABELS
        file.create_dataset("gzip", data=U, chunks=(16, 4, 5, 3), compression="gzip", shuffle=True)
        file.create_dataset("chunks", data=U, chunks=(7, 6, 5, 4))
        file.create_dataset("lzf", data=U, chunks=(16, 6, 5, 4), compression="lzf")
        file.create_dataset(
            "sums", data=U, chunks=(16, 6, 5, 4), fletcher32=True, compression="gzip"
        )
        file.create_dataset("hole", shape=U.shape, chunks=(10, 6, 5, 4), fillvalue=3.5, dtype="f4")[
            20:30
        ] = 1
        file["flags"] = LABELS > 2
        file["split"] = np.array(["train", "val"] * 50 + ["test"], "S5")
    return path


@needs_h5py
@pytest.mark.parametrize("name", ["plain", "gzip", "chunks", "lzf", "sums"])
def test_parts_of_arrays_are_what_numpy_says(name: str, tmp_path: Path) -> None:
    path = of_hdf5(tmp_path / "a.h5")
    source = hdf5.build(
        "hdf5",
        path,
        "train",
        fields={"x": f"/{name}[3:99:2, [0, 5, 2], 1:4:2, ::-1]", "y": "/labels[3:99:2]"},
    )
    drawn = DRAWN % len(source)
    batch = source.read(drawn)
    assert batch["x"].tobytes() == U[3:99:2][:, [0, 5, 2]][:, :, 1:4:2, ::-1][drawn].tobytes()
    assert batch["y"].tolist() == LABELS[3:99:2][drawn].tolist() and batch["y"].dtype == np.dtype(
        "int16"
    )


@needs_h5py
def test_several_arrays_are_stacked_behind_the_samples(tmp_path: Path) -> None:
    path = of_hdf5(tmp_path / "a.h5")
    fields: dict[str, Any] = {"x": ["/gzip[:, 1]", "/chunks[:, 2]"], "y": "/flags", "z": "/hole"}
    batch = hdf5.build("hdf5", path, "train", fields=fields, dtypes={"x": "float64"}).read(DRAWN)
    assert batch["x"].tobytes() == np.stack([U[:, 1], U[:, 2]], 1)[DRAWN].astype("f8").tobytes()
    assert batch["y"].tolist() == (LABELS > 2)[DRAWN].tolist()
    assert batch["z"][:, 0, 0, 0].tolist() == [1.0 if 20 <= one < 30 else 3.5 for one in DRAWN]


@needs_h5py
def test_packed_numbers_of_netcdf_are_unpacked(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "a.nc", "w") as file:
        packed = file.create_dataset(
            "t", data=np.arange(20, dtype="i2").reshape(10, 2), chunks=(4, 2), compression="gzip"
        )
        packed.attrs["scale_factor"], packed.attrs["add_offset"], packed.attrs["_FillValue"] = (
            0.5,
            np.float64(270),
            np.int16(7),
        )
        file["y"] = np.zeros(10)
    source = hdf5.build("netcdf", tmp_path / "a.nc", "train", fields={"x": "t", "y": "y"})
    assert (
        source.read(np.array([0, 9]))["x"].tolist() == [[270.0, 270.5], [279.0, 279.5]]
        and source.fields["x"].dtype == "float32"
    )
    with pytest.raises(UserError, match="field x of sample 3 has nan"):  # a missing value
        source.read(np.array([3]))


@needs_h5py
def test_a_block_is_decoded_once_for_all_samples_of_a_read_and_while_it_is_in_memory(
    tmp_path: Path,
) -> None:
    path = of_hdf5(tmp_path / "a.h5")
    source = stored(hdf5.build("hdf5", path, "train", fields={"x": "/gzip", "y": "/labels"}))
    cache = source.samples.cache
    source.read(np.arange(0, 101, 3))
    assert cache.decoded == 7 and source.rows_of_block == 16
    source.read(DRAWN)
    assert cache.decoded == 7
    small = dataclasses.replace(
        source,
        samples=dataclasses.replace(source.samples, cache=BlockCache(2 * 16 * 6 * 5 * 4 * 4)),
    )
    for _ in range(2):  # of seven blocks, two stay in memory
        assert small.read(np.arange(101))["x"].tobytes() == U.tobytes()
    assert small.samples.cache.decoded == 14


@needs_h5py
def test_processes_read_the_same(tmp_path: Path) -> None:
    source = hdf5.build(
        "hdf5", of_hdf5(tmp_path / "a.h5"), "train", fields={"x": "/lzf", "y": "/labels"}
    )
    found = source.read_by(2).read(DRAWN)
    assert (
        found["x"].tobytes() == U[DRAWN].tobytes() and found["y"].tolist() == LABELS[DRAWN].tolist()
    )


@needs_zarr
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_zarr_and_what_is_damaged(version: int, tmp_path: Path) -> None:
    import zarr as library

    path = tmp_path / "a.zarr"
    group: Any = library.open_group(str(path), mode="w", zarr_format=version)
    group.create_array("fields/u", shape=U.shape, chunks=(16, 4, 5, 3), dtype="f4")[:] = U
    group.create_array("labels", shape=(101,), chunks=(101,), dtype="i2")[:] = LABELS
    group.create_array("complex", shape=(101,), dtype="c8")

    def read(x: str = "fields/u[:, ::2, 1]", of: Path = path) -> Any:
        source = zarr.build("zarr", of, "train", fields={"x": x, "y": "labels"})
        return source.read_by(1).read(DRAWN) if x == "fields/u" else source.read(DRAWN)

    assert (
        read()["x"].tobytes() == U[:, ::2, 1][DRAWN].tobytes()
        and read()["y"].tolist() == LABELS[DRAWN].tolist()
    )
    assert read("fields/u")["x"].tobytes() == U[DRAWN].tobytes()
    assert "has no v; it has fields/u, labels" in error_of(lambda: read("v"))
    assert "complex numbers" in error_of(lambda: read("complex"))
    assert "no such file or folder" in error_of(lambda: read(of=tmp_path / "b"))
    assert "No such file or directory" in error_of(lambda: read(of=tmp_path / "b.zarr"))
    chunk = path / "fields" / "u" / ("1.0.0.0" if version == 2 else "c/1/0/0/0")
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    assert "cut off or damaged: fields/u, samples 16 to 31" in error_of(read)
    chunk.unlink()
    (note,) = stored(
        zarr.build("zarr", path, "train", fields={"x": "fields/u", "y": "labels"})
    ).notes
    assert "1 of 28 chunks of fields/u are not there, and are read as 0.0" in note


@needs_zarr
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("error")
def test_zarr_in_a_zip_file(version: int, tmp_path: Path) -> None:
    import zarr as library

    path = tmp_path / "train.zarr.zip"
    with library.storage.ZipStore(path, mode="w") as store:
        group: Any = library.open_group(store, mode="w", zarr_format=version)
        group.create_array("fields/u", shape=U.shape, chunks=(16, 4, 5, 3), dtype="f4")[:] = U
        group.create_array("labels", shape=(101,), chunks=(101,), dtype="i2")[:] = LABELS
    for root in (path, tmp_path):
        source = zarr.build("zarr", root, "train", fields={"x": "fields/u", "y": "labels"})
        batch = source.read_by(1).read(DRAWN)
        assert (
            batch["x"].tobytes() == U[DRAWN].tobytes()
            and batch["y"].tolist() == LABELS[DRAWN].tolist()
        )
    assert "has no v; it has fields/u, labels" in error_of(
        lambda: zarr.build("zarr", path, "train", fields={"x": "v", "y": "labels"})
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "it is not a Zarr group (File is not a zip file)" in error_of(
        lambda: zarr.build("zarr", path, "train")
    )
    path.write_bytes(whole.replace(b"PK\x01\x02", b"PK\x01\x00"))
    assert "it is not a Zarr group (Bad magic number" in error_of(
        lambda: zarr.build("zarr", path, "train")
    )
    damaged = bytearray(whole)
    damaged[whole.index(b"fields/u/c/1/0/0/0" if version == 3 else b"fields/u/1.0.0.0") + 60] ^= 16
    path.write_bytes(damaged)
    source = zarr.build("zarr", path, "train", fields={"x": "fields/u", "y": "labels"})
    assert "fields/u, samples 16 to 31: Bad CRC-32" in error_of(lambda: source.read(np.arange(101)))
    with zipfile.ZipFile(path, "w") as file, zipfile.ZipFile(io.BytesIO(whole)) as before:
        for name in before.namelist():
            file.writestr(f"inner.zarr/{name}", before.read(name))
    found = error_of(lambda: zarr.build("zarr", path, "train"))
    assert (
        "the zip file contains the folder inner.zarr, but the arrays of a Zarr group" in found
        and "cd inner.zarr && zip -0r ../train.zarr.zip ." in found
    )


CHECKED = ("crc", "gzip", "shards")


@needs_zarr
@pytest.mark.parametrize(
    ("version", "kind"), [(2, "plain"), (3, "plain"), *((3, kind) for kind in CHECKED)]
)
def test_zarr_damaged_at_random_is_read_or_refused(
    version: int, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bit, a few or the rest of a file: nothing but a UserError, and other numbers only where
    there is no checksum."""
    import zarr as library
    from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec

    options: dict[str, Any] = {
        "compressors": {"crc": [ZstdCodec(), Crc32cCodec()], "gzip": [GzipCodec()]}.get(
            kind, "auto"
        )
    }
    options |= (
        {"compressors": [GzipCodec(), Crc32cCodec()], "shards": (48, 6, 5, 4)}
        if kind == "shards"
        else {}
    )
    group: Any = library.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=version)
    group.create_array("fields/u", shape=U.shape, chunks=(16, 6, 5, 4), dtype="f4", **options)[
        :
    ] = U
    random = np.random.default_rng([version, len(kind)])
    found = Counter[str]()
    files = [file for file in sorted((tmp_path / "a.zarr").rglob("*")) if file.is_file()]
    for number in range(60):
        file = files[int(random.integers(len(files)))]
        whole = file.read_bytes()
        damaged = bytearray(file.read_bytes())
        for _ in range(1 + number % 3):
            damaged[random.integers(len(damaged))] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged if number % 4 else damaged[: int(random.integers(len(damaged)))])
        try:
            batch = zarr.build(
                "zarr",
                tmp_path / "a.zarr",
                "train",
                fields={"x": "fields/u", "y": "fields/u[:, 0]"},
            ).read(np.arange(101))
            found["right" if batch["x"].tobytes() == U.tobytes() else "other"] += 1
        except UserError:
            found["refused"] += 1
        file.write_bytes(whole)
    assert found["refused"] > 20 and (not found["other"] or kind not in CHECKED), found
    assert "Traceback" not in "".join(capfd.readouterr())


@needs_h5py
def test_splits_by_a_column(tmp_path: Path) -> None:
    path = of_hdf5(tmp_path / "a.h5")
    fields: dict[str, Any] = {"x": "/plain", "y": "/labels"}
    parts = {
        split: hdf5.build("hdf5", path, split, fields=fields, split_by="/split")
        for split in ("train", "val")
    }  # type: ignore[arg-type]
    assert (
        parts["train"].read(np.array([0, 49]))["x"].tobytes() == U[[0, 98]].tobytes()
        and len(parts["train"]) == 50
    )
    assert (
        parts["val"].read(np.array([0, 49]))["x"].tobytes() == U[[1, 99]].tobytes()
        and len(parts["val"]) == 50
    )
    chosen = hdf5.build("hdf5", path, "val", fields=fields, split_by="/labels", split_val=[4, 1])
    assert len(chosen) == np.isin(LABELS, [4, 1]).sum()


def test_endings_of_files_tell_the_format() -> None:
    assert data_of_path("run.nc") == "data.name=netcdf data.root=run.nc (docs/science-data.md)"
    assert data_of_path("run.H5") == "data.name=hdf5 data.root=run.H5 (docs/science-data.md)"


@needs_extra("staging")
def test_a_folder_that_counts_as_a_file_is_not_staged_alone(tmp_path: Path) -> None:
    root = tmp_path / "a.zarr"
    root.mkdir()
    words = ["data.name=zarr", f"data.root={root}", f"data.stage={tmp_path}/stage"]
    config = configure(None, words)
    assert "data.root is the single file a.zarr" in error_of(lambda: build_source(config, "train"))


def truncated(path: Path, share: float) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.where and caught.value.fix
    return str(caught.value)


@needs_h5py
def test_damaged_and_foreign_hdf5_files(tmp_path: Path) -> None:
    import h5py

    path = of_hdf5(tmp_path / "a.h5")

    def read(x: str = "/gzip", file: Path = path, **options: Any) -> Any:
        return hdf5.build("hdf5", file, "train", fields={"x": x, "y": "/labels"}, **options).read(
            np.arange(101)
        )

    assert "has no /nothing; it has /chunks, /flags, /gzip" in error_of(lambda: read("/nothing"))
    assert "/split has strings (|S5), expected integers or floats" in error_of(
        lambda: read("/split")
    )
    assert "of shape (101, 6, 5, 4)\n" in error_of(lambda: read("/gzip[:, 6]"))
    assert "the arrays do not have the same samples: /gzip[:7] 7, /labels 101" in error_of(
        lambda: read("/gzip[:7]")
    )
    assert "data.dtypes has x as 'object'" in error_of(lambda: read(dtypes={"x": "object"}))
    assert "which int16 cannot represent" in error_of(lambda: read(dtypes={"x": "int16"}))
    with h5py.File(path, "r+") as file:
        file["link"] = h5py.ExternalLink("b.h5", "/x")
        file["empty"] = h5py.Empty("f4")
        offset = file["gzip"].id.get_chunk_info(3).byte_offset
    of_hdf5(tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        file["x"] = U
    assert "/empty is empty: it has neither a shape nor numbers" in error_of(lambda: read("/empty"))
    assert "/link is only a link: its numbers are in another file" in error_of(
        lambda: read("/link")
    )
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 40] = bytes(40)
    path.write_bytes(raw)
    assert "a chunk of /gzip" in error_of(read)
    (tmp_path / "c.nc").write_bytes(b"CDF\x01" + bytes(500))
    assert (
        "netCDF's classic format" in (found := error_of(lambda: read(file=tmp_path / "c.nc")))
        and "nccopy" in found
    )
    for share in (0.0, 0.1, 0.6, 0.99):
        assert "cut off or damaged" in error_of(
            lambda share=share: read(file=truncated(of_hdf5(tmp_path / "d.h5"), share))
        )  # type: ignore[misc]
    source = hdf5.build(
        "hdf5", of_hdf5(tmp_path / "e.h5"), "train", fields={"x": "/gzip", "y": "/labels"}
    )
    truncated(tmp_path / "e.h5", 0.5)
    assert "the file has changed since the job began" in error_of(lambda: source.read(np.arange(3)))


@pytest.mark.parametrize(
    ("library", "name", "module"),
    [("h5py", "hdf5", hdf5), ("zarr", "zarr", zarr)],
)
def test_a_missing_library_is_named(
    library: str, name: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / f"train.{name}"
    (path.mkdir if name == "zarr" else path.touch)()
    path = path if name != "hdf5" else path.rename(tmp_path / "train.h5")
    assert f"pip install 'hvdtrain[{name}]'" in error_of(
        lambda: module.build(name, tmp_path, "train")
    )


_READ_ALL = """
import resource, sys
from pathlib import Path
import numpy as np
from hvdtrain.extras.science.data.datasets import hdf5
source = hdf5.build("hdf5", Path(sys.argv[1]), "train", fields={"x": "/packed", "y": "/plain"}, cache_mb=64)
source.read(np.arange(256))
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 200 * 10**6
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
total = sum(int(source.read(np.arange(first, first + 256))["x"].sum()) for first in range(0, len(source), 256))
print(len(source), total)
"""  # noqa: E501


@needs_h5py
def test_a_file_larger_than_the_memory_that_a_process_may_have_is_read(tmp_path: Path) -> None:
    """Two arrays of 1 GB each, one packed and one that is a hole in the file, and 200 MB of memory
    beyond what the imports take."""
    import h5py

    rows = 65536
    chunk = 256
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("plain", (rows, 4096), "f4")[-1] = 0
        packed = file.create_dataset(
            "packed", (rows, 4096), "f4", chunks=(chunk, 4096), compression="gzip"
        )
        raw = zlib.compress(np.ones((chunk, 4096), "f4").tobytes(), 1)
        for first in range(0, rows, chunk):
            packed.id.write_direct_chunk((first, 0), raw)
    done = subprocess.run(
        [sys.executable, "-c", _READ_ALL, str(tmp_path / "a.h5")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(rows), str(rows * 4096)], done.stderr

"""HDF5 and Zarr, where a mistake would have given wrong numbers, fewer samples or a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import stored_data
import zarr as zarr_library

from hvdtrain.errors import UserError
from hvdtrain.extras.science.data.datasets import hdf5, zarr
from hvdtrain.extras.science.netcdf_numbers import unpacked, unpacked_dtype
from hvdtrain.extras.science.stored.selection import SelectionBox


def test_missing_integers_are_an_error_and_missing_floats_nan() -> None:
    raw = np.array([1, -9999], np.int16)
    missing = {"_FillValue": np.int16(-9999)}
    with pytest.raises(UserError, match="1 numbers are missing"):
        unpacked(raw, missing, np.dtype("int16"), "u of f.nc")
    packed = unpacked(raw, missing | {"scale_factor": 0.1}, np.dtype("float32"), "u of f.nc")
    np.testing.assert_array_equal(packed, np.array([0.1, np.nan], np.float32))


@pytest.mark.parametrize("chunks", [None, (2, 2)])
@pytest.mark.parametrize("kind", ["12 bits", "offset", "bfloat16", "bool", "names", "big endian"])
def test_numbers_that_have_other_bytes_than_numpys(
    kind: str, chunks: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Whatever h5py says that they are."""
    h5t = h5py.h5t
    types = {
        "12 bits": h5t.STD_I16LE.copy(),
        "offset": h5t.STD_U32LE.copy(),
        "bfloat16": h5t.IEEE_F32LE.copy(),
    }
    types["12 bits"].set_precision(12)
    types["offset"].set_precision(16)
    types["offset"].set_offset(4)
    types["bfloat16"].set_fields(15, 7, 8, 0, 7)
    types["bfloat16"].set_size(2)
    types["bfloat16"].set_ebias(127)
    numbers = np.array([[7, -483], [-5, 100], [3, -1], [2, 2]])
    if kind in ("offset", "bool"):
        numbers = np.abs(numbers) % (2 if kind == "bool" else 500)
    with h5py.File(tmp_path / "train.h5", "w") as file:
        more = {} if chunks is None else {"chunks": chunks, "compression": "gzip", "shuffle": True}
        if kind in types:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if chunks:
                plist.set_chunk(chunks)
                plist.set_deflate(4)
            h5py.h5d.create(
                file.id, b"x", types[kind], h5py.h5s.create_simple(numbers.shape), plist
            )
            file["x"][...] = numbers
        elif kind == "bool":
            file.create_dataset("x", data=numbers.astype(bool), **more)
        elif kind == "names":
            file.create_dataset(
                "x",
                data=numbers.astype("int16"),
                dtype=h5py.enum_dtype({"A": 7, "B": -5}, "i2"),
                **more,
            )
        else:
            file.create_dataset("x", data=numbers, dtype=">i4", **more)
        file["y"] = np.zeros(4)
        expected = np.array(file["x"][...])
    found = hdf5.build("hdf5", tmp_path / "train.h5", "train", fields={"x": "/x", "y": "/y"}).read(
        np.arange(4)
    )["x"]
    np.testing.assert_array_equal(found, expected)
    assert kind == "bfloat16" or np.array_equal(found, numbers)


def test_numbers_by_the_conventions_of_netcdf() -> None:
    signed = np.array([-1, 5], np.int8)
    unsigned = {"_Unsigned": b"true"}
    assert unpacked(signed, unsigned, unpacked_dtype(signed.dtype, unsigned), "").tolist() == [
        255,
        5,
    ]
    scaled = unsigned | {"scale_factor": 0.5, "_FillValue": np.int8(5)}
    np.testing.assert_array_equal(
        unpacked(signed, scaled, np.dtype("float32"), ""), [127.5, np.nan]
    )
    floats = np.array([5.0, 500.0, -1.0], np.float32)
    within = {"valid_range": np.array([0.0, 100.0])}
    np.testing.assert_array_equal(unpacked(floats, within, floats.dtype, ""), [5.0, np.nan, np.nan])
    np.testing.assert_array_equal(
        unpacked(signed, {"scale_factor": 2.0, "valid_max": 9.0}, np.dtype("float32"), ""),
        [-2.0, np.nan],
    )
    with pytest.raises(UserError, match="2 numbers are missing"):
        unpacked(
            np.array([300, 3, -9]),
            {"valid_min": np.int16(0), "valid_max": np.int16(9)},
            np.dtype("int64"),
            "u of f.nc",
        )


@pytest.mark.parametrize("version", [2, 3])
def test_packed_numbers_of_zarr(version: int, tmp_path: Path) -> None:
    raw = np.array([[-1, 2], [3, 4]], np.int16)
    for name, fill in {"number": -1, "text": "AAAAAAAA8L8="}.items():  # xarray's text of -1.0
        group = zarr_library.open_group(
            str(tmp_path / f"{name}.zarr"), mode="w", zarr_format=version
        )
        array = group.create_array("x", shape=raw.shape, dtype=raw.dtype, chunks=(1, 2))
        array[:] = raw
        array.attrs.update({"scale_factor": 0.5, "add_offset": 10, "_FillValue": fill})
        group.create_array("y", shape=(2,), dtype="f8", chunks=(2,))[:] = 1.0
        source = zarr.build("zarr", tmp_path / f"{name}.zarr", "train", fields={"x": "x", "y": "y"})
        np.testing.assert_array_equal(source.read(np.array([1]))["x"], [[11.5, 12.0]])
        with pytest.raises(UserError, match="nan"):
            source.read(np.array([0]))


@pytest.mark.parametrize("width", ["f2", "f4", "f8", "i2"])
@pytest.mark.parametrize("attribute", ["_FillValue", "missing_value", "valid_max", "valid_range"])
def test_attributes_of_another_width_than_the_array(attribute: str, width: str) -> None:
    """The number 0.1 of the attribute is that of the array, whichever has more bits."""
    for number in (0.1, 200.0) if width != "i2" else (200,):
        array = np.array([3, number, -9], width)
        bound = np.float64(number) if width != "f8" else np.float32(number)
        if attribute.startswith("valid"):
            raw = np.array([-9, number], width)
            dtype = np.dtype(width)
            found = unpacked(
                raw,
                {
                    attribute: bound
                    if attribute == "valid_max"
                    else np.array([-9, bound], bound.dtype)
                },
                dtype,
                "u of f.nc",
            )
            assert found.tolist() == raw.tolist()
        else:
            missing = {
                attribute: np.array([-9, bound], bound.dtype)
                if attribute == "missing_value"
                else bound,
                "scale_factor": 1.0,
            }
            found = unpacked(array, missing, np.dtype("f8"), "u of f.nc")
            assert np.isnan(found).tolist() == [False, True, attribute == "missing_value"]
    assert not np.isnan(
        unpacked(
            np.array([44], "u1"), {"missing_value": 300.0, "scale_factor": 1.0}, np.dtype("f4"), ""
        )
    ).any()


@pytest.mark.parametrize("library", ["hdf5", "zarr"])
def test_coordinates_are_not_data(library: str, tmp_path: Path) -> None:
    """x and y of a grid number its points: nothing is trained on them unless data.fields says
    so."""
    values = np.arange(4.0)
    if library == "hdf5":
        with h5py.File(tmp_path / "t.h5", "w") as file:
            for name in ("x", "y"):
                file[name] = values
                file[name].make_scale(name)
    else:
        group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=3)
        for name in ("x", "y"):
            group.create_array(name, shape=(4,), dtype="f8", dimension_names=(name,))[:] = values
    build, path = (
        (hdf5.build, tmp_path / "t.h5") if library == "hdf5" else (zarr.build, tmp_path / "t.zarr")
    )
    with pytest.raises(UserError, match="which arrays are x and y"):
        build(library, path, "train")
    assert len(build(library, path, "train", fields={"x": "x", "y": "y"})) == 4


@pytest.mark.parametrize("library", ["hdf5", "zarr"])
def test_chunks_that_were_never_written_are_counted(library: str, tmp_path: Path) -> None:
    folder = tmp_path / ("t.h5" if library == "hdf5" else "t.zarr")
    file = (
        h5py.File(folder, "w")
        if library == "hdf5"
        else zarr_library.open_group(str(folder), mode="w")
    )
    create = file.create_dataset if library == "hdf5" else file.create_array
    for name, more in {"x": {}, "packed": {"packed": 1}, "y": {}, "year": {}}.items():
        array = create(name, shape=(60,), dtype="f4", chunks=(5,))
        array[: 60 if name == "y" else 10] = 1
        array.attrs.update({"scale_factor": 2.0} if more else {})
    if library == "hdf5":
        file.create_dataset("whole", shape=(60,), dtype="f4", fillvalue=7)
        file.close()
    build = hdf5.build if library == "hdf5" else zarr.build
    for x in ["x", "packed", *(["whole"] if library == "hdf5" else [])]:
        source = build(
            library, folder, "train", fields={"x": x, "y": "y"}, split_by="year", split_val=[0]
        )
        absent = (
            "1 of 1 chunks of whole are not there, and are read as 7"
            if x == "whole"
            else f"10 of 12 chunks of {x} are not there"
        )
        notes = [note.partition(": ")[2] for note in source.notes]
        assert [
            note.startswith(start)
            for note, start in zip(notes, [absent, "10 of 12 chunks of year"], strict=True)
        ] == [True, True]


@pytest.mark.parametrize("library", ["hdf5", "zarr"])
def test_the_column_of_the_split_has_a_value_for_each_sample(library: str, tmp_path: Path) -> None:
    columns = stored_data.columns_of_split()
    if library == "hdf5":
        with h5py.File(tmp_path / "t.h5", "w") as file:
            file.update(columns)
        stored_data.check_column_of_split(library, hdf5.build, tmp_path / "t.h5")
    else:
        group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w")
        for name, values in columns.items():
            group.create_array(name, data=values)
        stored_data.check_column_of_split(library, zarr.build, tmp_path / "t.zarr")


@pytest.mark.parametrize("chunks", [None, (2,)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "u4", "i8"])
def test_numbers_of_netcdf_that_were_never_written_are_missing(
    dtype: str, chunks: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Its library sets a fill value of its own (netcdf.h, NC_FILL_*), and no attribute says so."""
    fill = {
        "f4": 9.9692099683868690e36,
        "f8": 9.9692099683868690e36,
        "i2": -32767,
        "u4": 4294967295,
        "i8": -9223372036854775806,
    }[dtype]
    with h5py.File(tmp_path / "t.nc", "w") as file:
        for name, more in {"x": fill, "zero": 0}.items():
            file.create_dataset(
                name,
                shape=(6,),
                dtype=dtype,
                chunks=chunks,
                fillvalue=np.array(fill).astype(dtype)[()] if more else 0,
            )
            file[name][:3] = 1
        file["y"] = np.ones(6)
    with pytest.raises(UserError, match=r"sample 3 has nan|numbers are missing \(_FillValue\)"):
        hdf5.build("netcdf", tmp_path / "t.nc", "train", fields={"x": "x", "y": "y"}).read(
            np.arange(6)
        )
    source = hdf5.build("netcdf", tmp_path / "t.nc", "train", fields={"x": "zero", "y": "y"})
    assert source.read(np.arange(6))["x"].tolist() == [1, 1, 1, 0, 0, 0]


def test_the_fill_value_that_xarray_writes_into_zarr_2(tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=2)
    for name, more in {"x": {"_ARRAY_DIMENSIONS": ["n"]}, "y": {}}.items():
        array = group.create_array(name, shape=(2,), dtype="i2", chunks=(2,), fill_value=-32767)
        array[:] = [3, -32767]
        array.attrs.update({"scale_factor": 0.5} | more)
    for name, expected in {"x": [1.5, np.nan], "y": [1.5, -16383.5]}.items():
        array_ = zarr.ZarrGroup.open(tmp_path / "t.zarr").array(name)
        np.testing.assert_array_equal(
            array_.decode(0, SelectionBox((), ())), np.array(expected, np.float32)
        )  # type: ignore[union-attr]


def test_zarr_2_without_a_fill_value_is_read_as_0(tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=2)
    group.create_array("x", shape=(4,), dtype="f4", chunks=(2,))[:2] = 1
    group.create_array("y", shape=(4,), dtype="f4", chunks=(4,))[:] = 1
    description = tmp_path / "t.zarr" / "x" / ".zarray"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"fill_value": None}))
    source = zarr.build("zarr", tmp_path / "t.zarr", "train", fields={"x": "x", "y": "y"})
    assert source.read(np.arange(4))["x"].ravel().tolist() == [1, 1, 0, 0]
    (note,) = source.notes
    assert note.endswith("1 of 2 chunks of x are not there, and are read as 0"), note


@pytest.mark.parametrize("library", ["hdf5", "hdf5 of any length", "zarr", "zarr of any length"])
def test_names_of_classes_are_refused_with_the_words_that_count_them(
    library: str, tmp_path: Path
) -> None:
    """With data.fields, and without, where x and y are found by their names."""
    names = np.array(["cat", "dog", "cat"])
    path = tmp_path / ("t.h5" if library.startswith("hdf5") else "t.zarr")
    if library.startswith("hdf5"):
        with h5py.File(path, "w") as file:
            file["x"] = np.ones((3, 2), np.float32)
            file["y"] = names.tolist() if "any" in library else names.astype("S3")
    else:
        version = 3 if "any" in library else 2
        group = zarr_library.open_group(str(path), mode="w", zarr_format=version)
        group.create_array("x", shape=(3, 2), dtype="f4")[:] = 1
        texts = names.astype(np.dtypes.StringDType() if "any" in library else "U3")
        group.create_array("y", shape=(3,), dtype=texts.dtype)[:] = texts
    build = hdf5.build if library.startswith("hdf5") else zarr.build
    for options in ({}, {"fields": {"x": "x", "y": "y"}}):
        with pytest.raises(
            UserError, match="y has strings .*, expected integers or floats"
        ) as error:
            build("name", path, "train", **options)  # type: ignore[arg-type]
        assert "unpickling" not in str(error.value)
        assert "the numbers that np.unique(y, return_inverse=True)[1] returns" in error.value.fix

"""Files of science and their keys, where a mistake would have given wrong numbers, fewer samples or
a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pandas
import pytest
import zarr as zarr_library

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.data.datasets import csv, hdf5, npz, parquet, zarr
from hvdtrain.data.own.as_source import as_source
from hvdtrain.data.source import notes_of
from hvdtrain.data.stored.packing import unpacked, unpacked_dtype
from hvdtrain.data.stored.selection import Box
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import right_terms

JOB = ["model.name=linear", "batch.size=60", "log.display=lines"]


def test_a_line_with_more_columns_in_a_later_block_is_an_error(tmp_path: Path) -> None:
    lines = ["a,b,y", *["1.5,2.5,3"] * 40_000]
    lines[39_000] = "1,500,2,3"
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    source = csv.build("csv", tmp_path / "t.csv", "train")
    with pytest.raises(UserError, match="the line has 4 columns, the first line 3") as caught:
        source.read(np.array([38_999]))
    assert caught.value.where.endswith(":39001")


def test_a_table_without_lines_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n")
    with pytest.raises(UserError, match="the files have no samples"):
        csv.build("csv", tmp_path / "t.csv", "train")


@pytest.mark.parametrize("values", [["a", 2], [2, 77], [2, 300]])
def test_a_value_of_the_split_that_no_sample_has(values: list[object], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y,part\n" + "".join(f"{n},{n},{n % 3}\n" for n in range(9)))
    with pytest.raises(UserError, match="no sample has") as caught:
        csv.build("csv", tmp_path / "t.csv", "val", split_by="part", split_val=values)  # type: ignore[arg-type]
    assert caught.value.where == "data.split_val"


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


def test_a_run_of_blocks_does_not_go_on_in_another_order(tmp_path: Path) -> None:
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 20, "data.shuffle": "blocks"}, *JOB
    )
    with pytest.raises(UserError, match="the checkpoint has another data.shuffle"):
        hvdtrain.train(f"resume={run.folder}", "data.shuffle=full", "stop.steps=30")


@pytest.mark.parametrize("word", ["data.shuffle_window=4", "data.shuffle_block=7"])
def test_keys_of_blocks_need_them(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{word} has no effect without data.shuffle=blocks"):
        hvdtrain.train({"run": str(tmp_path / "run")}, *JOB, word)


def test_outputs_that_are_no_numbers_are_not_among_the_first() -> None:
    found = right_terms(np.full((4, 10), np.nan), np.arange(4), 5)
    assert not found["among_top"].any()


def test_segmentation_of_arrays_with_a_mean_of_ones_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = {
        "x": draw.integers(0, 256, (12, 8, 8, 3), np.uint8),
        "y": draw.integers(0, 3, (12, 8, 8)),
    }
    words = [
        "task.name=segmentation",
        "model.name=unet",
        "model.widths=[4,8]",
        "batch.size=6",
        "data.mean=[0.5,0.5,0.5]",
    ]
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 2},
        *words,
        "data.std=[0.5,0.5,0.5]",
        train_data=data,
        val_data=data,
    )
    np.testing.assert_allclose(
        run.transform(data["x"]), data["x"].transpose(0, 3, 1, 2) / 127.5 - 1, rtol=0, atol=1e-6
    )


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


@pytest.mark.parametrize("name", ["", "__index_level_0__", "when"])
def test_the_index_of_pandas_is_not_an_input(name: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": [0.5, 1.5, 2.5], "b": [1.0, 2.0, 3.0], "y": [0, 1, 1]})
    if name:
        frame = frame.set_index(
            pandas.Index([5, 3, 9], name=None if name.startswith("_") else name)
        )
    frame.to_parquet(tmp_path / "t.parquet")
    source = parquet.build("parquet", tmp_path / "t.parquet", "train")
    np.testing.assert_array_equal(source.read(np.arange(3))["x"], frame[["a", "b"]].to_numpy())
    notes = [note for note in source.notes if "not in x" in note]  # type: ignore[attr-defined]
    assert [name in note for note in notes] == ([True] if name else [])
    if name:
        chosen = parquet.build(
            "parquet", tmp_path / "t.parquet", "train", fields={"x": name, "y": "y"}
        )
        assert chosen.read(np.arange(3))["x"].tolist() == [5, 3, 9]


def test_a_column_that_numbers_the_rows_is_not_an_input(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": [0.5, 1.5, 2.5], "y": [0, 1, 1]}, index=[5, 3, 9])
    frame.to_csv(tmp_path / "a.csv")
    (tmp_path / "r.csv").write_text('"","a","y",\n"row 1",0.5,0,\n"row 2",1.5,1,\n"row 3",2.5,1,\n')
    for name in ("a.csv", "r.csv"):
        source = csv.build("csv", tmp_path / name, "train")
        assert source.read(np.arange(3))["x"].tolist() == [0.5, 1.5, 2.5]
        assert "Unnamed: 0" in notes_of(source)[0]
    read = pandas.read_csv(tmp_path / "a.csv")
    read.to_csv(tmp_path / "b.csv", index=False)
    assert csv.build("csv", tmp_path / "b.csv", "train").read(np.arange(3))["x"].tolist() == [
        0.5,
        1.5,
        2.5,
    ]
    with pytest.raises(UserError, match="'Unnamed: 0' of data is the index of a table of pandas"):
        as_source(read, "data", "train_data")


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
        notes = [note.partition(": ")[2] for note in notes_of(source)]
        assert [
            note.startswith(start)
            for note, start in zip(notes, [absent, "10 of 12 chunks of year"], strict=True)
        ] == [True, True]


@pytest.mark.parametrize("library", ["hdf5", "zarr", "npz", "csv", "parquet"])
def test_the_column_of_the_split_has_a_value_for_each_sample(library: str, tmp_path: Path) -> None:
    x = np.arange(8.0)
    y = np.arange(8.0)
    year = np.repeat([2000, 2001], [5, 3])
    path = tmp_path / f"t.{'h5' if library == 'hdf5' else library}"
    if library == "hdf5":
        with h5py.File(path, "w") as file:
            file.update({"x": x, "y": y, "year": year})
    elif library == "zarr":
        group = zarr_library.open_group(str(path), mode="w")
        for name, values in {"x": x, "y": y, "year": year}.items():
            group.create_array(name, data=values)
    elif library == "npz":
        np.savez(path, x=x, y=y, year=year)
    else:
        frame = pandas.DataFrame({"x": x, "y": y, "year": year})
        frame.to_csv(path, index=False) if library == "csv" else frame.to_parquet(path)
    build = {
        "hdf5": hdf5.build,
        "zarr": zarr.build,
        "npz": npz.build,
        "csv": csv.build,
        "parquet": parquet.build,
    }[library]
    fields = {"x": "x[1:]", "y": "y[1:]"}
    with pytest.raises(
        UserError,
        match=r"data.split_by=year has 8 values, and the file has 7 samples \(x\[1:\], y\[1:\]\)",
    ):
        build(library, path, "val", fields=fields, split_by="year", split_val=[2001])
    source = build(library, path, "val", fields=fields, split_by="year[1:]", split_val=[2001])
    assert source.read(np.arange(len(source)))["x"].tolist() == [5, 6, 7]
    last = build(
        library,
        path,
        "train",
        fields={"x": "x[1::3]", "y": "y[1::3]"},
        split_by="year[1::3]",
        split_val=[2001],
    )
    assert last.read(np.arange(len(last)))["x"].tolist() == [1, 4]


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
        array_ = zarr.ZarrGroup.of(tmp_path / "t.zarr").array(name)
        np.testing.assert_array_equal(array_.decode(0, Box((), ())), np.array(expected, np.float32))  # type: ignore[union-attr]


def test_integers_that_are_too_large_for_int64(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": np.full(4, 2**63 + 5, np.uint64), "y": np.arange(4.0)})
    frame.to_parquet(tmp_path / "t.parquet")
    source = parquet.build("parquet", tmp_path / "t.parquet", "train", fields={"x": "a", "y": "y"})
    with pytest.raises(UserError, match="field x of sample 2 has 9223372036854775813"):
        source.read(np.array([2, 3]))


def test_zarr_2_without_a_fill_value_is_read_as_0(tmp_path: Path) -> None:
    group = zarr_library.open_group(str(tmp_path / "t.zarr"), mode="w", zarr_format=2)
    group.create_array("x", shape=(4,), dtype="f4", chunks=(2,))[:2] = 1
    group.create_array("y", shape=(4,), dtype="f4", chunks=(4,))[:] = 1
    description = tmp_path / "t.zarr" / "x" / ".zarray"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"fill_value": None}))
    source = zarr.build("zarr", tmp_path / "t.zarr", "train", fields={"x": "x", "y": "y"})
    assert source.read(np.arange(4))["x"].ravel().tolist() == [1, 1, 0, 0]
    (note,) = notes_of(source)
    assert note.endswith("1 of 2 chunks of x are not there, and are read as 0"), note


def test_values_of_the_split_that_are_missing_or_in_neither_set(tmp_path: Path) -> None:
    parts = ["train", "val", "test", "holdout", "train", "val"]
    frame = pandas.DataFrame(
        {
            "x": np.arange(6.0),
            "y": np.arange(6.0),
            "part": parts,
            "day": pandas.date_range("2020-01-01", periods=6),
        }
    )
    frame.assign(gaps=[None, *parts[1:]], number=[np.nan, 1, 1, 1, 2, 2]).to_parquet(
        tmp_path / "t.parquet"
    )

    def of(column: str, **options: object) -> object:
        return parquet.build(
            "parquet",
            tmp_path / "t.parquet",
            "train",
            fields={"x": "x", "y": "y"},
            split_by=column,
            **options,
        )  # type: ignore[arg-type]

    source = of("part")
    assert len(source) == 2  # type: ignore[arg-type]
    assert any(
        "2 samples are in neither set: data.split_by=part has holdout, test" in note
        for note in notes_of(source)
    )  # type: ignore[arg-type]
    assert len(of("day", split_val=["2020-01-02 00:00:00"])) == 5  # type: ignore[arg-type]
    for column in ("gaps", "number"):
        with pytest.raises(UserError, match=f"{column} lacks 1 values"):
            of(column, split_val=["val"])
    np.savez(
        tmp_path / "t.npz",
        x=np.zeros(4),
        y=np.zeros(4),
        part=np.zeros((4, 2)),
        gaps=np.array([1, 2, np.nan, 2]),
    )
    with pytest.raises(
        UserError, match=r"part is of shape \(4, 2\), expected one value for each sample"
    ):
        npz.build("npz", tmp_path / "t.npz", "train", split_by="part", split_val=[1])
    with pytest.raises(UserError, match="data.split_by=gaps lacks 1 values"):
        npz.build(
            "npz",
            tmp_path / "t.npz",
            "train",
            fields={"x": "x", "y": "y"},
            split_by="gaps",
            split_val=[1],
        )


@pytest.mark.parametrize("library", ["csv", "parquet"])
def test_names_of_classes_in_a_table(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sorted names of the training set are the classes, also of a set that lacks some."""
    monkeypatch.chdir(tmp_path)
    build = csv.build if library == "csv" else parquet.build

    def write(name: str, labels: list[str | None], kind: str = "category", **more: object) -> None:
        frame = pandas.DataFrame({"a": np.arange(len(labels)) * 1.0, "label": labels, **more})
        if library == "csv":
            frame.to_csv(f"{name}.csv", index=False)
        else:
            frame.astype({"label": kind}).to_parquet(f"{name}.parquet", row_group_size=5)

    write("train", ["dog", "cat", "emu", "cat"] * 3)
    write("val", ["emu", "dog"], "str")
    train, val = (build(library, Path(), split) for split in ("train", "val"))
    assert train.read(np.array([0, 1, 6, 11]))["y"].tolist() == [1, 0, 2, 0]
    assert val.read(np.arange(2))["y"].tolist() == [2, 1]
    assert train.fields["y"].values == 3
    job = [f"data.name={library}", "data.root=.", "stop.steps=2", "run=run", "framework=numpy"]
    hvdtrain.train({}, *job, "model.name=linear", "batch.size=4", "log.display=lines")
    assert "3 classes: cat, dog, emu" in capsys.readouterr().out
    assert "class_names:\n  - cat\n  - dog\n  - emu\n" in Path("run/config.yaml").read_text()
    np.save("x.npy", np.arange(4.0)[:, None])
    assert main(["predict", "run", "--data", "x.npy", "--to", "-"]) == 0
    assert {line.split(",")[1] for line in capsys.readouterr().out.split()[1:]} <= {
        "cat",
        "dog",
        "emu",
    }
    (tmp_path / "other").mkdir()
    write("other/val", ["emu", "dog"])
    losses = []
    for root in (".", "other"):  # classes are those of the run, whatever the file has
        assert main(["evaluate", "run", "--json", "-", f"data.root={root}"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]
    write("other/val", ["emu", "yak"])
    assert main(["evaluate", "run", "data.root=other"]) == 2
    assert "the model does not know yak" in capsys.readouterr().err
    write("val", ["emu", "yak"])
    with pytest.raises(UserError, match="has the class 'yak'; the training set has cat, dog, emu"):
        build(library, Path(), "val")
    write("train", ["dog", None, "cat"])
    with pytest.raises(UserError, match="lacks 1 values|has names of classes, and ''"):
        build(library, Path(), "train")
    write("train", ["dog", "cat"], town=["Rome", "Oslo"])
    with pytest.raises(UserError, match="column town.* expected .*") as caught:
        build(library, Path(), "train")
    assert "data.fields={x: [a], y: label}" in caught.value.fix
    with pytest.raises(UserError, match="predicts numbers, and y has texts: cat, dog"):
        hvdtrain.train(
            {},
            *job,
            "task.name=regression",
            "data.fields={x: a, y: label}",
            "data.val_share=0.5",
            "model.name=linear",
        )

"""`predict --data FILE.nc --to FILE.nc`: maps with the coordinates of their data, in netCDF and
Zarr."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import needs_extra

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.grid import GridVariable
from hvdtrain.extras.predict import data_file
from hvdtrain.extras.science import write_netcdf, write_zarr
from hvdtrain.extras.science.data.datasets import hdf5, zarr
from hvdtrain.extras.science.stored.stored_array import StoredFile

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("h5py", "zarr"))), reason="needs h5py and zarr"
    ),
    needs_extra("forecasts"),
]
RANDOM = np.random.default_rng(2)
AXES = ("time", "lat", "lon")
FIELDS = RANDOM.normal(size=(30, 2, 4, 8)).astype("f4")
FIELDS[:, 0, 1, 2] = np.nan
AREA = RANDOM.uniform(0.5, 1.5, (4, 8))
COORDINATES = [
    GridVariable("time", ("time",), np.arange(30), {"units": "days since 2000-01-01"}),
    GridVariable("lat", ("lat",), np.linspace(-60, 60, 4), {"units": "degrees_north"}),
    GridVariable("lon", ("lon",), np.arange(8) * 45.0, {"units": "degrees_east"}),
    GridVariable("station", ("lon",), np.array(list("abcdefgh")), {}),
    GridVariable("zone", ("lat", "lon"), np.arange(32).reshape(4, 8), {}),
]
CONFIG: dict[str, Any] = {
    "data.fields": {"x": ["/t", "w"]},
    "data.shift": 1,
    "data.gaps": ["x", "y"],
    "data.split_by": "time",
    "data.split_val": ["2000-01-21:"],
    "task.name": "regression",
    "task.standardize": "channel",
    "task.weights": "area",
    "model.name": "unet",
    "model.widths": [4],
    "batch.size": 8,
    "max_steps": 2,
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def weather(name: str) -> None:
    """A file of two fields, as the writers under test write it."""
    variables = [
        GridVariable("t", AXES, FIELDS[:, 0], {"units": "K", "long_name": "temperature"}),
        GridVariable("w", AXES, FIELDS[:, 1], {}),
        GridVariable("area", AXES[1:], AREA, {}),
    ]
    write = write_netcdf.write if name.endswith(".nc") else write_zarr.write
    write(Path(name), variables, COORDINATES, {"title": "weather"})


def opened(name: str) -> StoredFile:
    path = Path(name)
    return hdf5.Hdf5File.open(path) if path.suffix == ".nc" else zarr.ZarrGroup.open(path)


def array(file: StoredFile, name: str) -> np.ndarray:
    stored: Any = file.array(name)
    box = hdf5.SelectionBox((0,) * (len(stored.shape) - 1), stored.shape[1:])
    if not hasattr(stored, "edges"):
        return np.asarray(stored.read(np.arange(stored.shape[0])))
    return np.concatenate([stored.decode(block, box) for block in range(len(stored.edges) - 1)])


@needs_extra("export")
@needs_extra("trained_models")
@pytest.mark.parametrize("end", [".nc", ".zarr"])
def test_predicted_maps_keep_the_coordinates(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    weather(f"all{end}")
    library = {".nc": "netcdf", ".zarr": "zarr"}[end]
    data = {"data.name": library, "data.root": f"all{end}", "run": "run"}
    run = hvdtrain.train({**CONFIG, **data})
    expected = hvdtrain.predict(run, FIELDS)
    squares = (expected[20:29] - FIELDS[21:]) ** 2
    share = np.where(np.isnan(squares), 0.0, AREA)
    weighted = (np.nan_to_num(squares) * share).sum() / share.sum()
    assert run.last == pytest.approx(weighted, rel=1e-5)
    for to in ("said.nc", "said.zarr"):
        assert main(["predict", "run", "--data", f"all{end}", "--to", to]) == 0
        file = opened(to)
        for number, name in enumerate(("t", "w")):
            assert np.array_equal(array(file, name), expected[:, number])
        grid = file.grid("t")
        assert grid is not None and grid.axes == AXES and grid.shape == (30, 4, 8)
        assert grid.attributes == {"units": "K", "long_name": "temperature"}
        found = {one.name: one for one in grid.coordinates}
        valid = found.pop("valid_time")
        assert valid.values.tolist() == list(range(1, 31))
        assert valid.attributes["units"] == "days since 2000-01-01"
        assert found.keys() == {one.name for one in COORDINATES}
        for one in COORDINATES:
            assert found[one.name].axes == one.axes
            assert found[one.name].values.tolist() == one.values.tolist()
            assert found[one.name].attributes == one.attributes
    assert main(["export", "run", "--to", "m.safetensors"]) == 0
    exported = capsys.readouterr().out
    assert "(x - mean) / std, by the first axis: mean" in exported and "of NaN" in exported
    assert main(["predict", "run", "--data", f"all{end}", "--to", "said.nc"]) == 2
    Path("link.zarr").symlink_to(f"all{end}")
    for to, words in ((f"all{end}", []), ("link.zarr", []), ("said.nc", ["data.root=said.nc"])):
        assert main(["predict", "run", "--data", f"all{end}", "--to", to, "--force", *words]) == 2
        assert "--force never replaces an input" in capsys.readouterr().err
    assert np.array_equal(array(opened(f"all{end}"), "t"), FIELDS[:, 0], equal_nan=True)
    again = ["predict", "run", "--data", f"all{end}", "--to", "said.zarr", "--force"]
    assert main([*again, "data.fields={x: ['t[10:20]', 'w[10:20]']}"]) == 0
    assert opened("said.zarr").values("time").tolist() == list(range(10, 20))
    assert not list(Path().glob(".said*"))


@pytest.mark.parametrize(
    ("fields", "has_gaps"), [("{x: t}", True), ("{x: t, y: w}", False), ("null", False)]
)
def test_a_gap_in_a_target_is_one_in_x_if_there_is_no_y(fields: str, has_gaps: bool) -> None:
    write_netcdf.write(Path("x.nc"), [GridVariable(x, AXES, FIELDS[:, 0]) for x in "xt"], [], {})
    words = ["data.name=netcdf", f"data.fields={fields}", "data.shift=1", "data.gaps=[y]"]
    source = data_file.open_stored("x.nc", configure(None, words))
    assert source.fields["x"].gaps == has_gaps


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_group_of_version_3_lists_its_arrays() -> None:
    """Also with consolidated metadata, as xarray writes it."""
    import zarr as library

    group = library.open_group("v3.zarr", mode="w", zarr_format=3)
    sizes = {"t": (30, 4, 8), "time": (30,), "lat": (4,)}
    for name, shape in sizes.items():
        axes = AXES if name == "t" else (name,)
        group.create_array(name, shape=shape, dtype="f4", dimension_names=axes)[...] = 1.0
    library.consolidate_metadata("v3.zarr")
    file = opened("v3.zarr")
    assert set(file.names) == sizes.keys() and set(file.coordinates) == {"time", "lat"}
    grid = file.grid("t")
    assert grid is not None and grid.axes == AXES
    assert [one.name for one in grid.coordinates] == ["time", "lat"]


@needs_extra("trained_models")
def test_maps_without_a_known_grid_have_plain_axes() -> None:
    data = {"x": FIELDS[:, 1:], "y": np.nan_to_num(FIELDS)}
    config = {key: value for key, value in CONFIG.items() if key.startswith("model.")}
    job = {**config, "task.name": "regression", "batch.size": 8, "max_steps": 2, "run": "run"}
    run = hvdtrain.train(job, train_data=data, val_data=data)
    np.savez("x.npz", x=data["x"])
    assert main(["predict", "run", "--data", "x.npz", "--to", "said.nc"]) == 0
    grid = opened("said.nc").grid("prediction")
    assert grid is not None and grid.axes == ("sample", "channel", "y", "x")
    assert grid.coordinates == ()
    found = array(opened("said.nc"), "prediction")
    assert np.array_equal(found, hvdtrain.predict(run, data["x"]))


@needs_extra("maps")
@needs_extra("trained_models")
def test_masks_of_fields_are_classes_with_coordinates() -> None:
    weather("all.nc")
    masks = (FIELDS[:, 1] > 0).astype("u1")
    data = {"x": FIELDS[:, [1, 1]], "y": masks}
    job = {"task.name": "segmentation", "task.classes": 2}
    model = {"model.name": "unet", "model.widths": [4], "batch.size": 8, "max_steps": 2}
    run = hvdtrain.train({**job, **model, "run": "run"}, train_data=data, val_data=data)
    words = ["--data", "all.nc", "--to", "said.nc", "data.fields={x: [w, w], y: storm}"]
    assert main(["predict", "run", *words]) == 0
    grid = opened("said.nc").grid("storm")
    assert grid is not None and grid.axes == AXES
    classes = hvdtrain.predict(run, data["x"]).argmax(1)
    assert np.array_equal(array(opened("said.nc"), "storm"), classes)


def test_other_predictions_are_not_maps(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"x": FIELDS[:, 1, 0], "y": FIELDS[:, 1, 1, 0]}
    job = {"task.name": "regression", "model.name": "linear", "max_steps": 1, "batch.size": 8}
    hvdtrain.train({**job, "run": "run"}, train_data=rows, val_data=rows)
    np.save("x.npy", rows["x"])
    assert main(["predict", "run", "--data", "x.npy", "--to", "said.nc"]) == 2
    assert "a file .nc or .zarr is for maps, but this run has" in capsys.readouterr().err
    assert main(["predict", "run", "--images", ".", "--to", "said.nc"]) == 2
    assert "said.nc does not end in .csv" in capsys.readouterr().err
    assert not Path("said.nc").exists()
    Path("empty.zarr").mkdir()
    weather("other.zarr")
    for to in ("empty.zarr", "other.zarr"):
        assert main(["predict", "run", "--data", "x.npy", "--to", to, "--force"]) == 2
        assert "not a Zarr group that predict has written" in capsys.readouterr().err

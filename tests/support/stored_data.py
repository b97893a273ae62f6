"""Scientific data for tests: the same samples in each format, and a job on them, on one or more
ranks, to compare with the job on arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdtrain
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.errors import UserError

SAMPLES = 203
JOB = {
    "task.name": "regression",
    "model.name": "mlp",
    "model.widths": [7],
    "speed.precision": "fp64",
    "optim.name": "sgd",
}
JOB |= {
    "optim.base_lr": 0.05,
    "epochs": 2,
    "batch.size": 24,
    "data.val_share": 0.1,
    "comm.engine": "auto",
    "task.standardize": True,
}


def samples() -> dict[str, np.ndarray]:
    """A field of two variables on a grid, and three numbers that follow from it."""
    random = np.random.default_rng(7)
    x = random.normal(2.0, 3.0, (SAMPLES, 2, 4, 3))
    return {"x": x, "y": x.reshape(SAMPLES, 24) @ random.normal(size=(24, 3))}


def write(folder: Path, name: str) -> None:
    """The samples as `data.name=name` reads them."""
    found = samples()
    x = found["x"]
    y = found["y"]
    if name == "npz":
        np.savez(folder / "data.npz", x=x, y=y)
    elif name == "hdf5":
        import h5py

        with h5py.File(folder / "data.h5", "w") as file:
            file.create_dataset(
                "fields/u", data=x[:, 0], chunks=(16, 4, 2), compression="gzip", shuffle=True
            )
            file.create_dataset("fields/v", data=x[:, 1], chunks=(25, 3, 3))
            file["y"] = y
    elif name == "zarr":
        import zarr

        group = zarr.open_group(str(folder / "data.zarr"), mode="w", zarr_format=2)
        group.create_array("x", shape=x.shape, chunks=(16, 2, 3, 3), dtype=x.dtype)[:] = x
        group.create_array("deep/y", shape=y.shape, chunks=(50, 2), dtype=y.dtype)[:] = y
    elif name == "parquet":
        import pyarrow
        import pyarrow.parquet

        columns = [pyarrow.array(column) for column in [*x.reshape(SAMPLES, 24).T, *y.T]]
        table = pyarrow.table(columns, names=[f"x{i}" for i in range(24)] + ["y0", "y1", "y2"])
        pyarrow.parquet.write_table(table, folder / "data.parquet", row_group_size=30)
    elif name == "csv":
        columns = {f"x{place}": column for place, column in enumerate(x.reshape(SAMPLES, 24).T)}
        columns |= {f"y{place}": column for place, column in enumerate(y.T)}
        lines = [
            ",".join(repr(float(number)) for number in row)
            for row in np.stack(list(columns.values()), 1)
        ]
        (folder / "data.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")


_COLUMNS = "data.fields={x: [" + ", ".join(f"x{i}" for i in range(24)) + "], y: [y0, y1, y2]}"
WORDS: dict[str, tuple[str, ...]] = {
    "npz": ("data.root=data.npz",),
    "hdf5": ("data.root=data.h5", "data.fields={x: [/fields/u, /fields/v], y: /y}"),
    "zarr": ("data.root=data.zarr", "data.fields={x: x, y: deep/y}"),
    "csv": ("data.root=data.csv", _COLUMNS),
    "parquet": ("data.root=data.parquet", _COLUMNS),
}


def weights(name: str | None, run: str, *words: str) -> dict[str, np.ndarray]:
    """What a job on a format, or on arrays, trains."""
    if name is not None:
        return dict(
            hvdtrain.train(JOB, f"run={run}", f"data.name={name}", *WORDS[name], *words).weights
        )
    data = samples()
    if "flat" in run:
        data["x"] = data["x"].reshape(SAMPLES, 24)
    return dict(hvdtrain.train(JOB, f"run={run}", *words, train_data=data).weights)


def train_on_ranks(folder: str, names: list[str], words: Sequence[str] = ()) -> int:
    """One job for each format on these ranks, and one on arrays; rank 0 leaves their weights."""
    os.chdir(folder)
    for name in names:
        found = weights(name or None, f"ranks-{name or 'arrays'}", *words)
        if placement(os.environ).rank == 0:
            np.savez(f"weights-{name or 'arrays'}.npz", **found)
    return 0


def bits(found: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in found.items()}


def columns_of_split() -> dict[str, np.ndarray]:
    """Eight samples of two years."""
    return {"x": np.arange(8.0), "y": np.arange(8.0), "year": np.repeat([2000, 2001], [5, 3])}


def check_column_of_split(library: str, build: Callable[..., Any], path: Path) -> None:
    """Checks that the column which splits the samples of columns_of_split() is split like the
    samples."""
    fields = {"x": "x[1:]", "y": "y[1:]"}
    with pytest.raises(
        UserError,
        match=r"data.split_by=year has 8 values, but the file has 7 samples \(x\[1:\], y\[1:\]\)",
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


def patients(samples: int, seed: int) -> Any:
    """A DataFrame with text, dates, truth values, missing cells, an identifier, and y: ill or
    well."""
    import pandas

    random = np.random.default_rng(seed)

    def some(values: Sequence[object], missing: float = 0.1) -> list[object]:
        chosen = random.integers(0, len(values), samples)
        gone = random.random(samples) < missing
        return [None if no else values[n] for n, no in zip(chosen, gone, strict=True)]

    towns = ["Bonn", "Köln", "Ulm, Neu-", 'the "Gate"', *(["Wesel"] if seed else [])]
    days = [f"2021-{month:02}-17" for month in range(1, 13)]
    frame = pandas.DataFrame(
        {
            "patient": [f"p{random.integers(2**40)}" for _ in range(samples)],
            "age": some([20.5, 34.0, 51.0, 1 / 3, 1e-7], 0.2),
            "sex": some(["f", "m"]),
            "visit": some(days),
            "smokes": random.random(samples) < 0.4,
            "town": some([*towns, *towns, *towns, "Celle"]),
            "ward": random.integers(1, 4, samples),
        }
    )
    ill = frame["age"].fillna(40).to_numpy() + 9 * frame["smokes"].to_numpy() > 36
    return frame.assign(label=np.where(ill, "ill", "well"))


PATIENTS: dict[str, Any] = {
    **{key: value for key, value in JOB.items() if key != "data.val_share"},
    "task.name": "classification",
    "data.name": "csv",
    "data.root": ".",
    "data.columns": {"patient": "drop", "ward": "category"},
    "data.missing": "mean",
    "data.rare": 12,
}


def train_patients_on_ranks(folder: str) -> int:
    """A job on train.csv and val.csv on these ranks; rank 0 leaves the weights."""
    os.chdir(folder)
    run = hvdtrain.train(PATIENTS, "run=on-ranks")
    if placement(os.environ).rank == 0:
        np.savez("on-ranks.npz", **run.weights)
    return 0

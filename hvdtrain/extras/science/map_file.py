"""`predict --to FILE.nc`: writes predicted maps with the coordinates of the data that they are
predicted from."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.folder import put_in_place
from hvdtrain.data.grid import Grid, GridVariable
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import Task
from hvdtrain.version import __version__

WHERE = "--to"
VALID_TIME = "valid_time"
_CHANNEL = "channel"
_PIXELS = ("y", "x")
_ATTRIBUTES = ".zattrs"  # of a Zarr group, as predict writes it
_SOURCE = "hvdtrain "  # begins the attribute `source`
_WRITERS = {
    ".nc": "hvdtrain.extras.science.write_netcdf",
    ".zarr": "hvdtrain.extras.science.write_zarr",
}


def check(to: str) -> None:
    """Raises UserError if such a file cannot be written, or if it would replace a folder that
    predict has not written."""
    path = Path(os.path.expanduser(to))
    _writer(path).check()
    if path.is_dir() and not _is_predicted(path):
        what = f"{to} is a folder, but not a Zarr group that predict has written"
        raise UserError(what, WHERE, "give another name")


def _is_predicted(group: Path) -> bool:
    try:
        about = json.loads((group / _ATTRIBUTES).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and str(about.get("source")).startswith(_SOURCE)


def _writer(path: Path) -> Any:
    return importlib.import_module(_WRITERS[path.suffix])


def maps_of(outputs: np.ndarray, task: Task) -> np.ndarray:
    """Converts outputs (n, ...) to maps (n, C, H, W); of segmentation to the classes of the pixels
    (n, H, W). Raises UserError if the model does not predict maps."""
    if task.mask_label is not None:
        classes = outputs.argmax(1)
        return classes.astype(np.uint8 if outputs.shape[1] <= 256 else np.int32)
    if not task.map_names:
        ends = " or ".join(_WRITERS)
        what = f"a file {ends} is for maps, but this run has task.name={task.name}, {task.summary}"
        raise UserError(what, WHERE, "--to FILE.csv")
    return task.as_maps(outputs)


def write(
    to: str, maps: np.ndarray, task: Task, source: Source | None, config: Config, checkpoint: str
) -> None:
    """Writes the result of maps_of() on one rank. Raises UserError if that fails.

    source: the inputs in a file with axes; None: the maps have no coordinates.
    """
    texts = _texts(config.data.options.get("fields") or {}, "x")
    grid = None if source is None else source.known_grid(texts[0] if texts else "x")
    axes = _axes(grid, maps.shape[-2:])
    known = () if grid is None else grid.coordinates
    coordinates = [one for one in known if set(one.axes) <= set(axes) and one.name != _CHANNEL]
    if config.data.shift is not None:
        coordinates += _valid_times(coordinates, axes[0], config.data.shift)
    variables = _variables(maps, axes, task, source, config)
    taken = {one.name for one in variables}
    coordinates = [one for one in coordinates if one.name not in taken]
    about = {"Conventions": "CF-1.11", "source": f"{_SOURCE}{__version__}, {checkpoint}"}
    path = Path(os.path.expanduser(to))
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        try:
            _writer(path).write(unfinished, variables, coordinates, about)
            put_in_place(unfinished, path)
        finally:
            _remove(unfinished)
    except OSError as error:
        raise UserError(
            f"cannot write {to}: {error.strerror or error}",
            WHERE,
            "give a folder that can be written and has room",
        ) from None


def _remove(path: Path) -> None:
    """Removes an unfinished file or folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    texts = fields.get(name, [])
    return [texts] if isinstance(texts, str) else list(texts)


def _axes(grid: Grid | None, pixels: tuple[int, ...]) -> tuple[str, str, str]:
    """Returns the names of the axes of the samples, rows and columns."""
    if grid is None:
        return ("sample", *_PIXELS)
    starts = [
        place for place in range(1, len(grid.shape) - 1) if grid.shape[place : place + 2] == pixels
    ]
    sample = grid.axes[0] or "sample"
    row, column = grid.axes[starts[-1] : starts[-1] + 2] if starts else ("", "")
    found = (sample, row or _PIXELS[0], column or _PIXELS[1])
    return found if len({*found, _CHANNEL}) == 4 else ("sample", *_PIXELS)


def _variables(
    maps: np.ndarray,
    axes: tuple[str, str, str],
    task: Task,
    source: Source | None,
    config: Config,
) -> list[GridVariable]:
    """Returns a variable for each channel whose name is known; else one of all channels."""
    fields = config.data.options.get("fields") or {}
    texts = _texts(fields, "y") or (_texts(fields, "x") if config.data.shift is not None else [])
    names = _names(texts)
    if maps.ndim == 3:
        name = names[0] if len(names) == 1 else "classes"
        return [GridVariable(name, axes, maps)]
    channels = maps.shape[1]
    attributes = [_described(text, source) for text in texts]
    if len(names) != channels and all(name.isidentifier() for name in task.map_names):
        names = list(task.map_names)
        attributes = [{}] * channels
    if len(names) == channels:
        return [
            GridVariable(name, axes, maps[:, number], attributes[number])
            for number, name in enumerate(names)
        ]
    name, about = (names[0], attributes[0]) if len(names) == 1 else ("prediction", {})
    return [GridVariable(name, (axes[0], _CHANNEL, *axes[1:]), maps, about)]


def _names(texts: Sequence[str]) -> list[str]:
    """Returns the names of arrays without their groups, if that keeps them apart."""
    paths = [text.partition("[")[0].strip().strip("/") for text in texts]
    short = [path.rpartition("/")[2] for path in paths]
    return short if len(set(short)) == len(short) else [path.replace("/", "_") for path in paths]


def _described(text: str, source: Source | None) -> Mapping[str, Any]:
    """Returns what describes an array of the file, such as its units."""
    grid = None if source is None else source.known_grid(text)
    return {} if grid is None else grid.attributes


def _valid_times(coordinates: Sequence[GridVariable], axis: str, steps: int) -> list[GridVariable]:
    """Returns the times for which predictions are valid: `steps` usual steps later. In a series
    without a usual step they are those of the later samples, and at its end NaN."""
    time = next((one for one in coordinates if one.name == axis and one.axes == (axis,)), None)
    if time is None or time.values.dtype.kind not in "iuf" or len(time.values) <= steps:
        return []
    differences = np.diff(time.values)
    usual = np.sort(differences)[len(differences) // 2]
    if np.isclose(differences, usual, rtol=1e-6, atol=0.0).mean() > 0.5:  # some may be missing
        values = time.values + steps * usual
    else:
        values = np.append(time.values[steps:].astype(np.float64), [np.nan] * steps)
    about = {key: value for key, value in time.attributes.items() if key in ("units", "calendar")}
    name = f"{axis} that is predicted, {steps} later than {axis}"
    return [GridVariable(VALID_TIME, (axis,), values, {**about, "long_name": name})]

"""Writes arrays with named axes as a Zarr group of version 2, which all of its readers know."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.grid import GridVariable
from hvdtrain.errors import UserError
from hvdtrain.extras.science.grids import COORDINATES


def check() -> None:
    """Raises UserError without zarr."""
    if importlib.util.find_spec("zarr") is None:
        what = "Zarr groups need the package zarr"
        raise UserError(what, "--to", "pip install 'hvdtrain[zarr]'")


def write(
    path: Path,
    variables: Sequence[GridVariable],
    coordinates: Sequence[GridVariable],
    attributes: Mapping[str, Any],
) -> None:
    """Writes the variables and their coordinates. Raises OSError.

    attributes: of the group.
    """
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=2, attributes=_as_json(attributes))
    for one in (*coordinates, *variables):
        others = [
            other.name
            for other in coordinates
            if other.axes != (other.name,) and set(other.axes) <= set(one.axes)
        ]
        named = {COORDINATES: " ".join(others)} if others and one in variables else {}
        stored = group.create_array(
            one.name,
            shape=one.values.shape,
            dtype=_dtype(one.values),
            chunks=_chunks(one),
            fill_value=None,
            attributes=_as_json({**one.attributes, **named, "_ARRAY_DIMENSIONS": list(one.axes)}),
        )
        stored[...] = one.values
    zarr.consolidate_metadata(path, zarr_format=2)


def _chunks(one: GridVariable) -> tuple[int, ...]:
    """A coordinate as a whole; of samples one each, as maps are read by time."""
    return (1, *one.values.shape[1:]) if one.values.ndim > 2 else one.values.shape


def _dtype(values: np.ndarray) -> Any:
    return values.dtype.newbyteorder("=")


def _as_json(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(value).tolist() if not isinstance(value, (str, list)) else value
        for name, value in attributes.items()
    }

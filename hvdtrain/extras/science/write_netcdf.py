"""Writes arrays with named axes as a netCDF-4 file, which is an HDF5 file with dimension scales."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.grid import GridVariable
from hvdtrain.errors import UserError
from hvdtrain.extras.science.grids import COORDINATES

# how netCDF names a dimension without a coordinate; its length follows, in 10 characters
_NO_COORDINATE = "This is a netCDF dimension but not a netCDF variable."


def check() -> None:
    """Raises UserError without h5py."""
    if importlib.util.find_spec("h5py") is None:
        what = "netCDF files need the package h5py"
        raise UserError(what, "--to", "pip install 'hvdtrain[hdf5]'")


def write(
    path: Path,
    variables: Sequence[GridVariable],
    coordinates: Sequence[GridVariable],
    attributes: Mapping[str, Any],
) -> None:
    """Writes the variables and their coordinates. Raises OSError.

    attributes: of the file.
    """
    import h5py

    sizes = {
        axis: size
        for one in (*coordinates, *variables)
        for axis, size in zip(one.axes, one.values.shape, strict=True)
    }
    along = {one.name: one for one in coordinates if one.axes == (one.name,)}
    others = [one for one in coordinates if one.name not in along]
    with h5py.File(path, "w", track_order=True) as file:
        file.attrs.update(attributes)
        for number, (axis, size) in enumerate(sizes.items()):
            if axis in along:
                _write(file, along[axis]).make_scale(axis)
            else:
                scale = file.create_dataset(axis, data=np.zeros(size, ">f4"))
                scale.make_scale(f"{_NO_COORDINATE}{size:10}")
            file[axis].attrs["_Netcdf4Dimid"] = np.int32(number)
        for one in (*others, *variables):
            stored = _write(file, one)
            for number, axis in enumerate(one.axes):
                stored.dims[number].attach_scale(file[axis])
        for one in variables:
            names = [other.name for other in others if set(other.axes) <= set(one.axes)]
            if names:
                file[one.name].attrs[COORDINATES] = " ".join(names)


def _write(file: Any, one: GridVariable) -> Any:
    """Creates an array with its attributes; texts as UTF-8."""
    import h5py

    if one.values.dtype.kind == "U":
        kind = h5py.string_dtype()
        stored = file.create_dataset(one.name, data=one.values.astype(object), dtype=kind)
    else:
        stored = file.create_dataset(one.name, data=one.values)
    for name, value in one.attributes.items():
        stored.attrs[name] = value
    return stored

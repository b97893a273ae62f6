"""Axes and coordinates of arrays by the netCDF conventions (CF 1.11, 4 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from hvdtrain.data.grid import Grid, GridVariable
from hvdtrain.extras.science.netcdf_numbers import WORDS

COORDINATES = "coordinates"  # the attribute with the names of other coordinates than axes
# attributes of how numbers are stored, and names of other variables
_LEFT_OUT = (
    *WORDS,
    COORDINATES,
    "CLASS",
    "NAME",
    "DIMENSION_LIST",
    "REFERENCE_LIST",
    "DIMENSION_LABELS",
    "_Netcdf4Dimid",
    "_Netcdf4Coordinates",
    "_NCProperties",
    "_ARRAY_DIMENSIONS",
    "ancillary_variables",
    "bounds",
    "grid_mapping",
)


def grid_of(
    name: str,
    axes: Sequence[str],
    shape: tuple[int, ...],
    attributes: Mapping[str, Any],
    read: Callable[[str], GridVariable | None],
) -> Grid:
    """Returns the grid of an array. read: returns an array of the file by its path with its axes;
    None if there is none of numbers or texts."""
    known = described(attributes)
    others = attributes.get(COORDINATES, "")
    words = [*axes, *(text_of(others).split() if isinstance(others, (str, bytes)) else [])]
    folder = PurePosixPath("/", name).parent
    coordinates = []
    for word in dict.fromkeys(word for word in words if word):
        paths = dict.fromkeys((str(folder / word), f"/{word}"))
        found = next((one for path in paths if (one := read(path)) is not None), None)
        if found is not None and set(found.axes) <= set(axes):
            coordinates.append(found)
    return Grid(tuple(axes), shape, tuple(coordinates), known)


def described(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes that describe an array, such as its units: texts and numbers."""
    found = {
        name: text_of(value) if isinstance(value, (str, bytes)) else value
        for name, value in attributes.items()
        if name not in _LEFT_OUT
    }
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return isinstance(value, str) or np.asarray(value).dtype.kind in "iuf"


def text_of(attribute: Any) -> str:
    return attribute.decode(errors="replace") if isinstance(attribute, bytes) else str(attribute)

"""Where the numbers of an array are: the names of its axes, and the coordinates along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class GridVariable(NamedTuple):
    """An array with named axes, such as a coordinate or a prediction."""

    name: str
    axes: tuple[str, ...]
    values: np.ndarray
    attributes: Mapping[str, Any] = MappingProxyType({})  # texts, numbers and arrays of numbers


class Grid(NamedTuple):
    """The axes of an array, and the coordinates whose axes are among them."""

    axes: tuple[str, ...]  # "" for an axis without a name
    shape: tuple[int, ...]
    coordinates: tuple[GridVariable, ...] = ()
    attributes: Mapping[str, Any] = MappingProxyType({})  # of the array, such as its units

    def cut(self, places: Sequence[np.ndarray | int]) -> Grid:
        """Returns the grid of the part of the array at these places of each axis, int64 (n,); an
        integer removes its axis, and the coordinates along it."""
        named = zip(self.axes, places, strict=True)
        left = [(axis, place) for axis, place in named if not isinstance(place, int)]
        kept = dict(left)
        coordinates = []
        for one in self.coordinates:
            if not set(one.axes) <= kept.keys():
                continue
            values = one.values
            for number, axis in enumerate(one.axes):
                values = values.take(kept[axis], number)
            coordinates.append(one._replace(values=values))
        axes = tuple(axis for axis, _ in left)
        shape = tuple(len(place) for _, place in left)
        return Grid(axes, shape, tuple(coordinates), self.attributes)

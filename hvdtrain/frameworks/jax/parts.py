"""The part of the parameters on a rank: a range of all parameters in one row, or of each unit of
shard.stage=3."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import part_of

_MOST_OFFSET = 2**31  # of a slice in JAX, whose indices are int32


def in_one_row(arrays: Sequence[Any]) -> Any:
    """Returns the elements of all arrays in one row.

    It writes them into the row one after the other. With a concatenation, for which XLA's code for
    a CPU is slow on several threads (jaxlib 0.10.2), the large network of benchmarks/jax_step.py
    takes 246 ms a step instead of 27.
    """
    length = sum(array.size for array in arrays)
    if length >= _MOST_OFFSET:
        return jnp.concatenate([array.ravel() for array in arrays])
    row = jnp.zeros(length, jnp.result_type(*arrays))
    at = 0
    for array in arrays:
        row = jax.lax.dynamic_update_slice(row, array.ravel().astype(row.dtype), (at,))
        at += array.size
    return row


class FlatShard:
    """A rank's part of all parameters in one row: a range of the elements of each parameter, maybe
    an empty one."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.shapes = list(shapes)
        self.length = sum(sizes)
        # ends of the parameters in the row, except the last
        self.ends = np.cumsum(sizes)[:-1].tolist()
        self.own = part_of(self.length, rank, size)
        begins = [0, *self.ends]
        self.ranges = [
            slice(*np.clip([self.own.start - at, self.own.stop - at], 0, n).tolist())
            for at, n in zip(begins, sizes, strict=True)
        ]
        self.lengths = [range_.stop - range_.start for range_ in self.ranges]

    def take(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns this rank's part of each parameter's array, (n,) each."""
        return _in_ranges(arrays, self.ranges)

    def of_row(self, row: Any) -> Any:
        """Returns this rank's part of a row of all parameters."""
        return row[self.own]

    def split(self, row: Any) -> list[Any]:
        """Splits a row of all parameters into arrays of their shapes, which may be views."""
        return [
            array.reshape(shape)
            for array, shape in zip(np.split(row, self.ends), self.shapes, strict=True)
        ]


class ShardedUnit(NamedTuple):
    """Parameters that are gathered at the same time."""

    parameters: list[int]  # their numbers
    cut: FlatShard


class CutUnits:
    """A rank's part of each unit, and so of each parameter."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], units: Sequence[list[int]], rank: int, size: int
    ) -> None:
        """units: the numbers of the parameters of each unit; each parameter is in exactly one."""
        self.shapes = list(shapes)
        self.units = [
            ShardedUnit(numbers, FlatShard([shapes[i] for i in numbers], rank, size))
            for numbers in units
        ]
        ranges = {
            i: own
            for unit in self.units
            for i, own in zip(unit.parameters, unit.cut.ranges, strict=True)
        }
        self.ranges = [ranges[i] for i in range(len(shapes))]
        self.lengths = [own.stop - own.start for own in self.ranges]
        self.length = sum(math.prod(shape) for shape in shapes)

    def take(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns this rank's part of each parameter's array, (n,) each."""
        return _in_ranges(arrays, self.ranges)

    def of_row(self, row: Any) -> Any:
        """Returns this rank's parts of a row of all parameters, concatenated."""
        begins = itertools.accumulate((math.prod(shape) for shape in self.shapes), initial=0)
        return jnp.concatenate(
            [
                row[at + own.start : at + own.stop]
                for at, own in zip(begins, self.ranges, strict=False)
            ]
        )


def _in_ranges(arrays: Sequence[Any], ranges: Sequence[slice]) -> list[Any]:
    return [array.reshape(-1)[own] for array, own in zip(arrays, ranges, strict=True)]

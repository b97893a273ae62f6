"""Selections from a stored array: `/fields/u[:, 0:3, ::2]`, in numpy's syntax, with a slice of the
samples first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import UserError

# a slice, a number or a list
_PART = re.compile(r"\s*(?:(-?\d*):(-?\d*)(?::(-?\d*))?|(-?\d+)|\[([\d\s,-]*)\])\s*")
_FIX = (
    "NAME[samples, axis, ...], of slices (0:3, ::2), numbers and lists ([0, 2]): /fields/u[:, 0:3]"
)


class SelectionBox(NamedTuple):
    """The smallest part of a row that contains everything selected: [first, last) along each
    axis."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in zip(self.first, self.last, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.first, self.last))


@dataclass(frozen=True)
class Selection:
    """Samples first + i * step for i < samples, and the part of each row that pick() takes from its
    box."""

    first: int
    step: int
    samples: int
    box: SelectionBox
    # selection within the box; an integer removes its axis
    inside: tuple[slice | int | np.ndarray, ...]

    @property
    def places(self) -> list[np.ndarray | int]:
        """Returns the selected positions of each axis of the array, the samples first, int64 (n,);
        an integer where an axis is removed."""
        found: list[np.ndarray | int] = [self.first + self.step * np.arange(self.samples)]
        for low, high, part in zip(self.box.first, self.box.last, self.inside, strict=True):
            found.append(low + part if isinstance(part, int) else np.arange(low, high)[part])
        return found

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """Returns the selected part of rows: (n, *box.shape) -> (n, *selected)."""
        for axis in reversed(range(len(self.inside))):
            index = self.inside[axis]
            if not isinstance(index, slice):
                rows = rows[(slice(None),) * (axis + 1) + (index,)]
        return rows


def select(words: str, shape: tuple[int, ...], text: str, where: str) -> Selection:
    """Returns the selection `words`, such as `:, 0:3`, of an array of this shape; without words,
    everything. Raises UserError if the array has no such part."""
    parts = _parts(words, text, where) or [slice(None)]
    if not isinstance(parts[0], slice) or (parts[0].step or 1) < 1:
        raise UserError(f"{text} does not begin with a slice of the samples", where, _FIX)
    if len(parts) > len(shape):
        raise UserError(
            f"{text} has {len(parts)} axes, but the array has shape {shape}",
            where,
            "leave axes out",
        )
    first, last, step = parts[0].indices(shape[0])
    samples = len(range(first, last, step))
    lows = []
    highs = []
    inside = []
    for axis, size in enumerate(shape[1:], 1):
        part = parts[axis] if axis < len(parts) else slice(None)
        try:
            chosen = _places(part, size)
        except IndexError:
            raise UserError(
                f"{text} is outside of the array, of shape {shape}",
                where,
                f"0 to {size - 1} along axis {axis}",
            ) from None
        if not len(chosen):
            raise UserError(
                f"{text} selects nothing along axis {axis} of the array, of shape {shape}",
                where,
                _FIX,
            )
        low = min(chosen[0], chosen[-1]) if isinstance(chosen, range) else min(chosen)
        high = 1 + (max(chosen[0], chosen[-1]) if isinstance(chosen, range) else max(chosen))
        is_whole = (
            list(chosen) == list(range(low, high)) if isinstance(chosen, list) else chosen.step == 1
        )
        lows.append(low)
        highs.append(high)
        inside.append(
            0 if isinstance(part, int) else slice(None) if is_whole else np.array(chosen) - low
        )
    return Selection(first, step, samples, SelectionBox(tuple(lows), tuple(highs)), tuple(inside))


def _places(part: slice | int | list[int], size: int) -> range | list[int]:
    """Returns the selected positions along an axis; a slice takes no memory, whatever its length.
    Raises IndexError."""
    every = range(size)
    if isinstance(part, slice):
        return every[part]
    return [every[one] for one in (part if isinstance(part, list) else [part])]


def _parts(words: str, text: str, where: str) -> list[slice | int | list[int]]:
    parts: list[slice | int | list[int]] = []
    rest = words
    while rest.strip():
        match = _PART.match(rest)
        if match is None or (rest[match.end() :] and rest[match.end()] != ","):
            raise UserError(f"{text} cannot be read", where, _FIX)
        start, stop, step, number, listed = match.groups()
        if number is not None:
            parts.append(int(number))
        elif listed is not None:
            parts.append([int(one) for one in re.findall(r"-?\d+", listed)])
        else:
            if step == "0":
                raise UserError(f"{text} has a step of 0", where, _FIX)
            parts.append(slice(*(int(one) if one else None for one in (start, stop, step))))
        rest = rest[match.end() + 1 :]
    return parts

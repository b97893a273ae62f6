"""An array in a file: rows that are read individually by their position, or blocks of rows that are
decoded together."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.data.field import TARGETS
from hvdtrain.data.grid import Grid
from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.selection import SelectionBox
from hvdtrain.extras.split_files.files import FileOnDisk, cut_off


class Blocks(Protocol):
    """An array whose rows are stored in blocks, as in compressed files. A worker process gets a
    pickled copy."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def edges(self) -> np.ndarray:
        """Returns int64 (blocks + 1,): block b has the rows edges[b] ... edges[b + 1] - 1."""

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        """Decodes a block into a new array (rows, *box.shape). Safe to call from several threads.
        Raises UserError if the block is damaged."""


@dataclass(frozen=True, eq=False)
class PlainRows:
    """An array that is stored row by row, as in memory."""

    file: FileOnDisk
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        if self.offset < 0 or end > self.file.size:
            raise cut_off(self.file.path, f"an array extends to byte {end} of {self.file.size}")

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads ascending rows, int64 (n,), as (n, *shape[1:]); neighbouring rows are read
        together. Raises UserError if the file is truncated."""
        selected = np.empty((len(rows), *self.shape[1:]), self.dtype)
        flat = selected.reshape(len(rows), -1).view(np.uint8) if self.row_bytes else selected
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        with self.file.opened() as file:
            for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
                raw = file.read(
                    self.offset + int(rows[start]) * self.row_bytes,
                    int(end - start) * self.row_bytes,
                )
                flat[start:end] = np.frombuffer(raw, np.uint8).reshape(end - start, -1)
        return selected


StoredArray = PlainRows | Blocks


class Texts(NamedTuple):
    """Columns of a table as text."""

    columns: list[list[str]]  # of each column, a text for each row; an empty one is a missing cell
    lines: Sequence[int] = ()  # of the file, for each row; empty for files without lines


class StoredFile(ABC):
    """A file, or a folder that acts as one, with arrays or columns by name.

    The defaults are for a file of plain arrays: not a table, no coordinates.
    """

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all arrays or columns that hold numbers."""

    @abstractmethod
    def array(self, name: str) -> StoredArray:
        """Returns an array. Raises UserError if there is no such name, or if the array does not
        hold numbers."""

    @abstractmethod
    def values(self, name: str) -> np.ndarray:
        """Reads a whole column of numbers or strings (n,). Raises UserError if it does not
        exist."""

    def plane(self, name: str) -> np.ndarray:
        """Reads a whole array (n,) or (H, W), such as the areas of points. Raises UserError if it
        does not exist."""
        return self.values(name)

    def grid(self, name: str) -> Grid | None:
        """Returns the axes of an array with their coordinates, and what describes it; None if the
        format does not name axes. Raises UserError if it does not exist."""
        return None

    @property
    def without_numbers(self) -> Collection[str]:
        """Returns the names of arrays that `names` excludes because they are not numbers."""
        return ()

    @property
    def coordinates(self) -> Collection[str]:
        """Returns the names of arrays that only number rows or points of an axis, such as a pandas
        index; they are inputs only if data.fields names them."""
        return ()

    def edges_of_texts(self, name: str, *, may_be_names: bool = False) -> np.ndarray | None:
        """Returns Blocks.edges of a table column with strings, such as class names; None otherwise.
        may_be_names: also for other values, such as true and false, which are class names if the
        training set has names."""
        return None

    def columns(self, names: list[str]) -> Blocks | None:
        """Returns several columns as one array (n, columns) if the format reads them together; else
        None."""
        return None

    def texts(self, names: Sequence[str]) -> Texts:
        """Returns all cells of columns of a table as text. Only tables have them."""
        raise NotImplementedError(f"{type(self).__name__} is not a table")

    def note(self, name: str) -> str:
        """Returns a line for the user if a part of an array was never written, so that its fill
        value is read; otherwise empty."""
        return ""


MOST_ROWS = 2**31  # limit for any axis of an array: the indices of so many samples take 16 GiB


def check_shape(shape: tuple[int, ...], name: str, path: Path) -> None:
    """Raises UserError for an impossible shape or too many samples, before memory is allocated."""
    if min(shape, default=0) < 0:
        raise cut_off(path, f"{name} is of shape {shape}")
    if max(shape, default=0) > MOST_ROWS:
        raise UserError(
            f"{name} is of shape {shape}, at most {MOST_ROWS:,} along each axis",
            str(path),
            "divide it into several files",
        )


def check_dtype(dtype: np.dtype[Any], name: str, path: Path, has_texts: bool = False) -> None:
    """Raises UserError unless the dtype is a number of at most 64 bits. Objects (which would have
    to be unpickled), strings and records are rejected.

    has_texts: whether objects are strings, of a format without pickle.
    """
    if dtype.kind in "iufb" and dtype.itemsize <= 8:
        return
    kinds = {
        "O": "strings" if has_texts else "objects",
        "S": "strings",
        "U": "strings",
        "T": "strings",
        "V": "records",
        "c": "complex numbers",
        "M": "times",
        "m": "times",
    }
    what = (
        f"{name} has {kinds.get(dtype.kind, 'numbers of more than 64 bits')} ({dtype}), expected "
        "integers or floats"
    )
    fix = "another array in data.fields, or write it again as numbers"
    if dtype.kind in "SUTO":
        fix += (
            "; for class names, store the numbers that "
            f"np.unique({name.rpartition('/')[2]}, return_inverse=True)[1] returns for the names "
            "of both sets"
        )
    if dtype.kind == "O" and not has_texts:
        what += "; objects are never read: unpickling them could run code"
    raise UserError(what, str(path), fix)


def check_axes(shape: tuple[int, ...], most_axes: int, name: str, path: Path) -> None:
    """Raises UserError for an array with more axes than are read whole, or none."""
    if 1 <= len(shape) <= most_axes:
        return
    expected = "one value for each sample" if most_axes == 1 else "one or two axes"
    fix = "another array as data.split_by" if most_axes == 1 else "another array"
    raise UserError(f"{name} is of shape {shape}, expected {expected}", str(path), fix)


def no_such(name: str, names: list[str], path: Path) -> UserError:
    """Returns the error for a file without an array of this name."""
    shown = (
        ", ".join(names[:24]) + (f" and {len(names) - 24} more" if len(names) > 24 else "")
        or "none"
    )
    return UserError(
        f"the file has no {name}; it has {shown}", str(path), "data.fields={x: NAME, y: NAME}"
    )


@dataclass(frozen=True, eq=False)
class Labels:
    """The classes of a column of names, counted in memory."""

    numbers: np.ndarray  # (n,)
    edges: np.ndarray

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.numbers.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        return self.numbers[self.edges[block] : self.edges[block + 1]].copy()


def leaving_out(names: Sequence[str], wrong: Collection[str]) -> str:
    """Returns the configuration that trains on a table without some of its columns."""
    target = next((name for name in TARGETS if name in names and name not in wrong), None)
    others = [name for name in names if name not in wrong and name not in TARGETS]
    if target is None or not 0 < len(others) <= 24 or len(set(names)) < len(names):
        return "data.fields={x: [COLUMN, ...], y: COLUMN} takes other columns"
    return f"data.fields={{x: [{', '.join(map(as_yaml, others))}], y: {target}}} leaves it out"


def as_yaml(name: str) -> str:
    """Quotes a name for YAML."""
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else json.dumps(name)


def whole(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in this machine's byte order."""
    return dtype.newbyteorder("=")

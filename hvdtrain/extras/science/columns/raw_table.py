"""The cells of a table as text, from a file or a frame, before anything is learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

import numpy as np

from hvdtrain.extras.science.columns.cells import EXACT, is_missing


@dataclass(frozen=True, eq=False)
class RawColumn:
    """The different texts of a column, and which of them each row has. An empty text is a missing
    cell."""

    texts: tuple[str, ...]  # sorted
    rows: np.ndarray  # int32 (n,): the place of a row's text

    @staticmethod
    def of(cells: Iterable[str]) -> RawColumn:
        places: dict[str, int] = {}
        found = [
            places.setdefault("" if is_missing(cell) else _whole(cell.strip()), len(places))
            for cell in cells
        ]
        order = sorted(places)
        rank = np.empty(len(order), np.int32)
        rank[[places[text] for text in order]] = np.arange(len(order), dtype=np.int32)
        return RawColumn(tuple(order), rank[np.array(found, np.int64)])

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """Returns in how many of these rows each text occurs, int64 (texts,)."""
        return np.bincount(self.rows[rows], minlength=len(self.texts))

    @property
    def is_missing(self) -> np.ndarray:
        """bool (n,)."""
        has_missing = bool(self.texts) and not self.texts[0]
        return self.rows == 0 if has_missing else np.zeros(len(self.rows), bool)


class RowsOfFile(NamedTuple):
    """The rows of one file, for messages."""

    name: str
    rows: int
    lines: Sequence[int] = ()  # of each row; empty for files without lines


@dataclass(frozen=True, eq=False)
class RawTable:
    """The columns of x of one or more files, in the order of the model's inputs."""

    columns: Mapping[str, RawColumn]
    files: tuple[RowsOfFile, ...]

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def rows_with_missing(self) -> np.ndarray:
        """bool (n,): whether a row has a missing cell."""
        found = np.zeros(len(self), bool)
        for column in self.columns.values():
            found |= column.is_missing
        return found

    def place(self, row: int) -> str:
        """Names a row: `line 12`, or `row 10`, which counts from 0; with several files also the
        file."""
        for file in self.files:
            if row < file.rows:
                shown = f"line {file.lines[row]}" if len(file.lines) else f"row {row}"
                return shown if len(self.files) == 1 else f"{shown} of {file.name}"
            row -= file.rows
        raise IndexError(row)


def _whole(text: str) -> str:
    """Returns "1" for "1.0": pandas writes whole numbers so if their column has a missing cell, and
    they are the same category."""
    return text[:-2] if text.endswith(".0") and text[:-2].lstrip("-").isdecimal() else text


def text_of(value: object) -> str:
    """A cell of a Parquet file or a DataFrame as the text that a CSV file would have: the same
    column becomes the same numbers."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < EXACT else repr(value)
    return value.isoformat() if isinstance(value, date) else str(value)

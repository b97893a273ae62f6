"""Everything that is wrong with the columns of a table, in one message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.errors import UserError, short
from hvdtrain.extras.science.columns.raw_table import RawColumn, RawTable

_MOST_SHOWN = 24


class Problems:
    """Collects problems with columns, each with a fix."""

    def __init__(self, table: RawTable, kinds: Mapping[str, str] | None) -> None:
        """kinds: data.columns as set; None if a trained model reads the table, so that its kinds
        are known."""
        self._table = table
        self._kinds = kinds
        self._found: list[str] = []
        self._kind_of: dict[str, str] = {}  # data.columns that would correct it
        self._lacks_cells = False

    def add(self, column: str, what: str, kind: str) -> None:
        """Adds a problem that this kind of the column would correct."""
        self._found.append(f"column {short(column, 60)}: {what}")
        self._kind_of[column] = kind

    def add_missing(self, name: str, column: RawColumn, rows: np.ndarray) -> None:
        """Adds the missing cells of these rows."""
        missing = rows[column.is_missing[rows]]
        cells = "1 cell is" if len(missing) == 1 else f"{len(missing):,} cells are"
        first = self._table.place(int(missing[0]))
        self._found.append(f"column {short(name, 60)}: {cells} empty, in {first} first")
        self._lacks_cells = True

    def add_unread(
        self, name: str, column: RawColumn, rows: np.ndarray, places: Sequence[int], expected: str
    ) -> None:
        """Adds cells of these rows whose texts cannot be read."""
        wrong = rows[np.isin(column.rows[rows], places)]
        text = short(repr(column.texts[column.rows[wrong[0]]]), 40)
        cells = "1 cell is" if len(wrong) == 1 else f"{len(wrong):,} cells are"
        self.add(
            name,
            f"{cells} not {expected}, in {self._table.place(int(wrong[0]))} first: {text}",
            "category",
        )

    def check(self, where: str) -> None:
        """Raises UserError with all problems; nothing if there are none."""
        if not self._found:
            return
        shown = self._found[:_MOST_SHOWN]
        if more := len(self._found) - len(shown):
            shown.append(f"and {more} more columns")
        count = "a problem" if len(self._found) == 1 else f"{len(self._found)} problems"
        what = "\n    ".join([f"the table has {count}:", *shown])
        raise UserError(what, where, "; ".join(self._fixes()))

    def _fixes(self) -> list[str]:
        if self._kinds is None:
            return ["correct or fill these cells, or leave the rows out"]
        fixes = []
        if self._lacks_cells:
            fixes.append(
                "data.missing=mean, median or 0 fills empty cells and marks them in a number of "
                "their own; data.missing=drop leaves their rows out"
            )
        if self._kind_of:
            kinds = {**self._kinds, **self._kind_of}
            shown = ", ".join(f"{_as_yaml(name)}: {kind}" for name, kind in kinds.items())
            fixes.append(f"'data.columns={{{shown}}}' before training, or correct these cells")
        return fixes


def _as_yaml(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else json.dumps(name)

"""The cells of the columns of x, if these are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.option_error import OptionError
from hvdtrain.errors import UserError, nearest, short
from hvdtrain.extras.science.columns.options import DROP, ColumnOptions
from hvdtrain.extras.science.columns.raw_table import RawColumn, RawTable, RowsOfFile
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.stored_array import StoredFile


def table_of_x(
    files: list[StoredFile],
    paths: list[Path],
    fields: Mapping[str, list[str]],
    wanted: Wanted,
) -> RawTable | None:
    """Reads the columns of x from all files, without those that data.columns drops; None if
    its columns are numbers only. Raises UserError if there is no x or no other field, and for a
    name that the table lacks."""
    options = wanted.columns
    if options is None:
        return None
    x = fields.get("x", [])
    if not x or len(fields) == 1 or any(name_and_words(text)[1] for text in x):
        raise OptionError(
            "data.columns encodes columns of x, beside another field",
            "columns",
            "data.fields={y: COLUMN}, or {x: [COLUMN, ...], y: COLUMN} without parts of columns",
        )
    if not wanted.dtypes.get("x", "float64").startswith("float"):
        raise OptionError(
            f"data.dtypes has x as {wanted.dtypes['x']}, but encoded columns are floats",
            "dtypes",
            "data.dtypes={x: float32}",
        )
    for name, kind in options.kinds.items():
        # a table of later samples may lack a column that data.fields does not name
        is_known = name in x or (
            kind == DROP and (wanted.fields is not None or name in files[0].names)
        )
        if not is_known:
            raise OptionError(
                f"data.columns has {short(name, 60)}, which is not a column of x",
                "columns",
                nearest(name, list(x)),
            )
    names = [name for name in x if options.kinds.get(name) != DROP]
    if not names:
        raise OptionError("data.columns drops all columns of x", "columns", "keep one of them")
    tables = [file.texts(names) for file in files]
    columns = {
        name: RawColumn.of(chain.from_iterable(table.columns[place] for table in tables))
        for place, name in enumerate(names)
    }
    rows = tuple(
        RowsOfFile(path.name, len(table.columns[0]), table.lines)
        for path, table in zip(paths, tables, strict=True)
    )
    return RawTable(columns, rows)


def rows_without_missing(table: RawTable, options: ColumnOptions, path: Path) -> np.ndarray:
    """Returns the rows that are samples, int64 (n,): with data.missing=drop those without a missing
    cell. Raises UserError if there are none."""
    if options.missing != DROP:
        return np.arange(len(table))
    rows = np.flatnonzero(~table.rows_with_missing)
    if not len(rows):
        raise UserError(
            "every row has an empty cell, and data.missing=drop leaves all of them out",
            str(path),
            "data.missing=mean; or data.columns={COLUMN: drop} for a column that is seldom filled",
        )
    return rows

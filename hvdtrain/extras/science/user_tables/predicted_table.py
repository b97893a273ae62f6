"""`predict --data ROWS.csv`: selects the columns that the model was trained with, by name."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.configured.columns import columns_of_x
from hvdtrain.data.field import TARGETS
from hvdtrain.errors import UserError, first_line, short
from hvdtrain.extras.science.columns import cells
from hvdtrain.extras.science.columns.encoding import Encoding, lines_of_unknown, numbers_of
from hvdtrain.extras.science.columns.raw_table import RawColumn, RawTable, RowsOfFile
from hvdtrain.extras.science.data.datasets import csv as csv_files
from hvdtrain.extras.science.data.datasets import parquet
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.stored_array import StoredFile

_MOST_BYTES = 2**31  # of a row group, unpacked


def read_numbers(path: Path, options: Mapping[str, Any]) -> np.ndarray:
    """Reads a CSV file as (n, columns), integers if all numbers are. TRUE and FALSE are 1 and 0.
    options: of the run's data set.

    If the first row names the columns, the run's columns are selected by name, and a line on stderr
    lists the others; if the run's columns are unknown, all except a target are used. Raises
    UserError for a row of another length, for a missing column, and for a cell that is not a
    number.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file, delimiter=_delimiter(options)) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path} cannot be read: {first_line(error)}", "--data", "a table of numbers, as UTF-8"
        ) from None
    if not rows:
        raise UserError(f"{path} has no rows", "--data", "a row for each sample")
    names: list[str] = []
    if not all(_is_number(cell) or _is_truth(cell) for cell in rows[0]):
        names = [csv_files.column_name(text, place) for place, text in enumerate(rows.pop(0))]
    width = len(names or rows[0])
    columns = _chosen(names, width, columns_of_x(options), path)
    for number, row in enumerate(rows):
        if len(row) != width:
            raise UserError(
                f"row {number} of {path} has {len(row)} values, the first one {width}",
                "--data",
                "the same number of values in each row",
            )
    chosen = [[row[column].strip() for row in rows] for column in columns]
    read: list[Callable[[str], Any]] = [
        cells.truth if all(map(_is_truth, texts)) else cells.number for texts in chosen
    ]
    for texts, column, of_text in zip(chosen, columns, read, strict=True):
        wrong = next((n for n, text in enumerate(texts) if not _is_one(of_text, text)), None)
        if wrong is not None:
            what = (
                f"row {wrong}, column {short(names[column]) if names else column} of {path} is "
                f"{short(repr(texts[wrong]))}, expected a number"
            )
            raise UserError(what, "--data", "replace it, or leave the row or the column out")
    numbers = [
        [str(of_text(text)) if of_text is cells.truth else text for text in texts]
        for texts, of_text in zip(chosen, read, strict=True)
    ]
    whole = all(map(cells.is_int64, itertools.chain.from_iterable(numbers)))
    return np.array(numbers, str).astype(np.int64 if whole else np.float64).T.copy()


def _delimiter(options: Mapping[str, Any]) -> str:
    return csv_files.delimiter_of(options.get("delimiter")) or ","


def read_encoded(path: Path, options: Mapping[str, Any], encoding: Encoding) -> np.ndarray:
    """Reads float64 (n, features) of a CSV or Parquet file whose columns become what they became in
    training. Columns are found by name; a line on stderr lists others, and unknown categories.

    Raises UserError for a missing column, and for cells that cannot be read.
    """
    names = [column.name for column in encoding.columns]
    file: StoredFile
    if path.suffix in (".parquet", ".pq"):
        file = parquet.ParquetFile.open(path, _MOST_BYTES)
    else:
        file = csv_files.CsvFile.open(path, _delimiter(options), Wanted({"x": names}))
    _chosen(file.names, len(file.names), names, path)
    texts = file.texts(names)
    raw = RawTable(
        dict(zip(names, map(RawColumn.of, texts.columns), strict=True)),
        (RowsOfFile(path.name, len(texts.columns[0]), texts.lines),),
    )
    rows = np.arange(len(raw))
    if not len(rows):
        raise UserError(f"{path} has no rows", "--data", "a row for each sample")
    encoded = encoding.encode(raw, rows, str(path))
    for line in lines_of_unknown(raw, encoded, rows):
        print(f"{path}: {line}", file=sys.stderr)
    return numbers_of(raw, encoded, rows)


def _chosen(names: list[str], width: int, wanted: Sequence[str], path: Path) -> list[int]:
    """Returns the positions of the columns of x. wanted: their names; empty if they are unknown.
    Raises UserError if one is missing or duplicated."""
    if not names:
        return list(range(width))
    if not wanted:
        inputs = [place for place, name in enumerate(names) if name not in TARGETS]
        shown = short(", ".join(names[place] for place in inputs), 200)
        print(f"{path}: the run records no columns; taken in this order: {shown}", file=sys.stderr)
        return inputs
    if missing := [name for name in wanted if name not in names]:
        raise UserError(
            f"{path} has no column {short(missing[0], 60)}; it has {short(', '.join(names), 200)}",
            "--data",
            f"the columns of the training data: {short(', '.join(wanted), 200)}",
        )
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise UserError(
            f"{path} has two columns named {short(twice[0], 60)}",
            "--data",
            "another name for one of them",
        )
    if others := [name for name in names if name not in (*wanted, *TARGETS)]:
        print(f"{path}: not inputs of the model: {short(', '.join(others), 200)}", file=sys.stderr)
    return [names.index(name) for name in wanted]


def _is_number(text: str) -> bool:
    return _is_one(cells.number, text)


def _is_truth(text: str) -> bool:
    return _is_one(cells.truth, text)


def _is_one(read: Callable[[str], Any], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True

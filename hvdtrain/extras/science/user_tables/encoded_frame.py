"""DataFrames with columns of text, dates, truth values and missing cells."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.data.field import TARGETS
from hvdtrain.data.input_encoding import EncodedData
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import NamedArrays, Source
from hvdtrain.data.subset import subset
from hvdtrain.data.user_data.arrays import to_numpy
from hvdtrain.errors import UserError, nearest, short
from hvdtrain.extras.science.columns.encoded_table import EncodedTable
from hvdtrain.extras.science.columns.encoding import Encoding, lines_of_unknown, numbers_of
from hvdtrain.extras.science.columns.options import DROP, ColumnOptions
from hvdtrain.extras.science.columns.raw_table import RawColumn, RawTable, RowsOfFile, text_of


@dataclass(frozen=True, eq=False)
class FrameToEncode(EncodedData):
    """A DataFrame whose columns are encoded, and the training set, whose strings y are the
    classes."""

    frame: Any
    train: Any
    options: ColumnOptions

    def source(self, name: str, where: str) -> Source:
        return source_of_frame(self, name, where)


def frame_to_encode(given: Any, train: Any, options: ColumnOptions, where: str) -> FrameToEncode:
    """Returns the DataFrame to encode. Raises UserError if the data are not DataFrames with a
    target."""
    for frame in (given, train):
        if not _is_frame(frame) or target_of(frame) is None:
            raise UserError(
                f"data.columns, data.missing and data.rare need a table, but the data are a "
                f"{type(frame).__name__}",
                where,
                f"a DataFrame with a column {', '.join(TARGETS)}; or leave these keys out",
            )
    return FrameToEncode(given, train, options)


def source_of_frame(given: FrameToEncode, name: str, where: str) -> Source:
    """Returns the samples of a DataFrame; they wait until the encoding has been learned from the
    training rows. Raises UserError if a kind is set for a column that the frame lacks."""
    frame = given.frame
    kinds = given.options.kinds
    target = target_of(frame)
    others = [column for column in map(str, frame.columns) if column != target]
    if unknown := [column for column in kinds if column not in others]:
        raise OptionError(
            f"data.columns has {short(unknown[0], 60)}, which is not a column of x",
            "columns",
            nearest(unknown[0], others),
        )
    names = [column for column in others if kinds.get(column) != DROP]
    if not names:
        raise OptionError("data.columns drops all columns of x", "columns", "keep one of them")
    table = raw_frame(frame, names, name)
    rows = np.arange(len(table))
    if given.options.missing == DROP:
        rows = np.flatnonzero(~table.rows_with_missing)
    classes = _names_of_classes(given.train)
    y = labels_of_frame(frame[target], classes, f"column {target} of {name}", where)
    labels = NamedArrays({"y": y}, {"y": len(classes)} if classes else {}, name)
    encoded = EncodedTable(labels, table, rows, given.options, name, names_of_y=classes)
    return encoded if len(rows) == len(table) else subset(encoded, rows)


def target_of(frame: Any) -> str | None:
    return next((target for target in TARGETS if target in frame.columns), None)


def raw_frame(frame: Any, names: Sequence[str], name: str) -> RawTable:
    """Returns the cells of columns of a frame."""
    columns = {str(column): frame[column] for column in frame.columns}
    cells = {column: RawColumn.of(map(text_of, columns[column].tolist())) for column in names}
    return RawTable(cells, (RowsOfFile(name, len(frame)),))


def _names_of_classes(frame: Any) -> tuple[str, ...]:
    """Returns the sorted strings of the target; none if it has numbers."""
    values = frame[target_of(frame)].tolist()
    texts = {value for value in values if isinstance(value, str)}
    return tuple(sorted(texts))


def labels_of_frame(column: Any, classes: Sequence[str], what: str, where: str) -> np.ndarray:
    """Returns the class of each row, or the numbers of the column. Raises UserError for a class
    that is missing or unknown."""
    if not classes:
        return to_numpy(column, what, where)
    numbers = {text: number for number, text in enumerate(classes)}
    values = column.tolist()
    if unknown := [value for value in values if value not in numbers]:
        raise UserError(
            f"{what} has {short(repr(unknown[0]), 40)}; the classes are {', '.join(classes[:8])}",
            where,
            "a class of the training set for each row",
        )
    return np.array([numbers[value] for value in values], np.int64)


def with_encoded_x(given: Any, encoding: Encoding, classes: Sequence[str], where: str) -> Any:
    """Encodes the frames of x in data that the user gives to a trained model; other data are not
    changed. Raises UserError for a missing column."""
    if isinstance(given, Mapping) and "x" in given:
        return {**given, "x": _encoded(given["x"], encoding, where)}
    if isinstance(given, (tuple, list)) and len(given) == 2 and _is_frame(given[0]):
        return (_encoded(given[0], encoding, where), given[1])
    if not _is_frame(given):
        return given
    x = _encoded(given, encoding, where)
    target = target_of(given)
    if target is None:
        return x
    column = given[target]
    has_texts = column.dtype.kind not in "iufb"
    y = labels_of_frame(column, classes, f"column {target}", where) if has_texts else column
    return {"x": x, "y": y}


def _encoded(x: Any, encoding: Encoding, where: str) -> Any:
    if not _is_frame(x):
        return x
    names = [column.name for column in encoding.columns]
    known = list(map(str, x.columns))
    if missing := [name for name in names if name not in known]:
        raise UserError(
            f"the data have no column {short(missing[0], 60)}",
            where,
            f"the columns of the training data: {short(', '.join(names), 200)}",
        )
    table = raw_frame(x, names, "the data")
    rows = np.arange(len(table))
    encoded = encoding.encode(table, rows, where)
    for line in lines_of_unknown(table, encoded, rows):
        print(line, file=sys.stderr)
    return numbers_of(table, encoded, rows)


def _is_frame(given: Any) -> bool:
    return hasattr(given, "columns") and hasattr(given, "to_numpy")

"""Columns of Parquet files; a row group is read when one of its samples is needed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hvdtrain.data.field import TARGETS, padded_by
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source, Split
from hvdtrain.data.user_data.arrays import from_arrow, is_index
from hvdtrain.errors import UserError, first_line, short
from hvdtrain.extras.science.columns.options import column_options
from hvdtrain.extras.science.columns.raw_table import text_of
from hvdtrain.extras.science.stored.build import build_stored
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.selection import SelectionBox
from hvdtrain.extras.science.stored.stored_array import (
    Blocks,
    StoredArray,
    StoredFile,
    Texts,
    leaving_out,
    no_such,
    whole,
)
from hvdtrain.extras.science.texts_of_table import texts_of_table
from hvdtrain.extras.split_files.files import FileOnDisk, cut_off

STAGING = Staging(is_of_user=True, may_be_a_file=True)


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    fields: dict[str, str | list[str]] | None = None,
    dtypes: dict[str, str] | None = None,
    split_by: str | None = None,
    split_val: list[bool | int | str] | None = None,
    cache_mb: int = 256,
    columns: dict[str, str] | str | None = None,
    missing: Literal["error", "mean", "median", "drop", 0] = "error",
    rare: int = 0,
    text: str | None = None,
    messages: str | None = None,
    target: str | None = None,
    tokenizer: Path | None = None,
    context: int | None = None,
    special_tokens: bool = True,
    pad_token: str | None = None,
) -> Source:
    """Columns of train.parquet and val.parquet in data.root, of several such files, or of one with
    data.val_share or data.split_by.

    fields: the column of each field, {x: [height, width], y: label} (default: y, label, labels or
        target is y, all other columns are x)
    dtypes: number types that fields are converted to, {x: float32}
    split_by: a column that marks validation samples: by the words train and val, or by the values
        of split_val
    split_val: values of split_by that mark validation samples, and ranges of them, "2003:2005"
    cache_mb: most megabytes of decoded row groups that a rank keeps for each set
    columns: kinds of columns of x, {visit: date, town: category, id: drop}: number, bool, date,
        category or drop; the kinds of other columns are detected (auto: of all columns); default:
        all columns of x are numbers
    missing: error rejects missing cells of x; mean, median or 0 replaces them and adds a number
        that marks them; drop leaves their rows out
    rare: categories that fewer training rows have are joined
    text: column with texts that are read as tokens, as by data.name=jsonl, instead of numbers
    messages: column with chats, lists of {role, content}, instead of text
    target: column y of these texts (none: a language model predicts the tokens)
    tokenizer: tokenizer.json or a folder of transformers with it (none: each byte is a token)
    context: most tokens of a text that a model reads; longer ones are cut
    special_tokens: add special tokens to texts, as the tokenizer does
    pad_token: token for padding (default: pad_token of the tokenizer's folder, else its eos_token)

    Raises UserError without pyarrow, if files are damaged or lack a column, and for columns with
    missing values or without numbers.
    """
    texts: dict[str, object] = {
        "text": text,
        "messages": messages,
        "target": target,
        "tokenizer": tokenizer,
        "context": context,
        "special_tokens": special_tokens,
        "pad_token": pad_token,
    }
    suffixes = (".parquet", ".pq")
    open_file = partial(ParquetFile.open, most_bytes=_BLOCKS * cache_mb * 10**6)
    numbers = {"fields": fields, "dtypes": dtypes, "split_by": split_by, "columns": columns}
    found = texts_of_table(
        name,
        root,
        split,
        suffixes,
        lambda path, names: enumerate(_rows_of(open_file(path), names)),
        texts,
        numbers,
        word="row",
    )
    if found is not None:
        return found
    encoded = column_options(columns, missing, rare)
    wanted = Wanted(fields, dtypes or {}, split_by, split_val, cache_mb, encoded)
    return build_stored(name, root, split, suffixes, open_file, wanted)


def _rows_of(table: ParquetFile, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yields the rows of columns of texts or chats."""
    for group in range(len(table.edges) - 1):
        columns = [column.to_pylist() for column in table.read(group, names)]
        for cells in zip(*columns, strict=True):
            yield dict(zip(names, cells, strict=True))


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise OptionError(
            "Parquet files need the package pyarrow", "name", "pip install 'hvdtrain[parquet]'"
        ) from None
    return pyarrow


_BLOCKS = 4  # a row group may take this many times data.cache_mb while it is unpacked
_ITEM_BYTES = {"INT64": 8, "DOUBLE": 8, "FLOAT": 4}


@dataclass(frozen=True, eq=False)
class ParquetFile(StoredFile):
    file: FileOnDisk
    columns_in_file: list[str]
    edges: np.ndarray  # int64 (row groups + 1,)
    index_columns: Collection[str]
    most_bytes: int  # the largest unpacked row group
    with_texts: Collection[str] = ()  # columns

    @staticmethod
    def open(path: Path, most_bytes: int) -> ParquetFile:
        file = FileOnDisk.at(path)
        pyarrow = _pyarrow()
        try:
            with pyarrow.parquet.ParquetFile(path) as opened:
                rows = [
                    opened.metadata.row_group(number).num_rows
                    for number in range(opened.num_row_groups)
                ]
                names = list(opened.schema_arrow.names)
                coordinates = _index_columns(names, opened.schema_arrow.metadata or {})
                texts = [
                    column.name
                    for column in opened.schema_arrow
                    if "string" in str(getattr(column.type, "value_type", column.type))
                    and (
                        pyarrow.types.is_dictionary(column.type)
                        or not pyarrow.types.is_nested(column.type)
                    )
                ]
                edges = np.cumsum([0, *rows], dtype=np.int64)
                return ParquetFile(file, names, edges, coordinates, most_bytes, texts)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise cut_off(path, f"it is not a Parquet file ({first_line(error)})") from None

    @property
    def names(self) -> list[str]:
        return self.columns_in_file

    @property
    def coordinates(self) -> Collection[str]:
        return self.index_columns

    def edges_of_texts(self, name: str, *, may_be_names: bool = False) -> np.ndarray | None:
        return self.edges if may_be_names or name in self.with_texts else None

    def array(self, name: str) -> StoredArray:
        return RowGroups.named(self, [name])

    def columns(self, names: list[str]) -> Blocks | None:
        return RowGroups.named(self, names)

    def values(self, name: str) -> np.ndarray:
        groups = range(len(self.edges) - 1)
        values = [value for group in groups for value in self.read(group, [name])[0].to_pylist()]
        if absent := sum(value is None for value in values):
            raise UserError(
                f"column {name} lacks {absent:,} values",
                str(self.file.path),
                "fill them, or remove these rows",
            )
        if any(isinstance(value, (list, dict)) for value in values):
            raise UserError(
                f"column {name} has lists, expected one value for each row",
                str(self.file.path),
                "another column",
            )
        are_numbers = all(isinstance(value, (bool, int, float)) for value in values)
        # dates too
        return (
            np.array(values)
            if are_numbers
            else np.array([str(value).strip() for value in values], str)
        )

    def texts(self, names: Sequence[str]) -> Texts:
        """Returns the columns' texts. Raises UserError for columns of lists."""
        columns: list[list[str]] = [[] for _ in names]
        for group in range(len(self.edges) - 1):
            for name, column, values in zip(names, columns, self.read(group, names), strict=True):
                cells = values.to_pylist()
                if any(isinstance(cell, (list, dict, bytes)) for cell in cells):
                    raise UserError(
                        f"column {name} is {values.type}, expected one value for each row",
                        str(self.file.path),
                        f"data.columns={{{name}: drop}}",
                    )
                column.extend(map(text_of, cells))
        return Texts(columns)

    def _check_size(self, metadata: Any, group: int, names: Sequence[str]) -> None:
        """Raises UserError if columns of a row group would exceed the memory limit."""
        columns = [metadata.column(place) for place in range(metadata.num_columns)]
        size = sum(
            _bytes_of(column)
            for column in columns
            if column.path_in_schema.split(".")[0] in names or column.path_in_schema in names
        )
        if size > self.most_bytes:
            what = (
                f"{', '.join(names)} of row group {group} takes {size / 1e6:,.0f} MB in memory, "
                f"at most {self.most_bytes / 1e6:,.0f}"
            )
            raise UserError(
                what,
                str(self.file.path),
                f"data.cache_mb={1 + size // (_BLOCKS * 10**6)}, or smaller row groups",
            )

    def read(self, group: int, names: Sequence[str]) -> list[Any]:
        """Reads columns of a row group as pyarrow arrays. Raises UserError if they are damaged."""
        missing = next((name for name in names if name not in self.columns_in_file), None)
        if missing is not None:
            raise no_such(f"column {missing}", self.columns_in_file, self.file.path)
        pyarrow = _pyarrow()
        with self.file.opened():  # checks that the file has not changed
            pass
        try:
            with pyarrow.parquet.ParquetFile(
                self.file.path, page_checksum_verification=True
            ) as opened:
                self._check_size(opened.metadata.row_group(group), group, names)
                table = opened.read_row_group(group, columns=list(names), use_threads=False)
                table.validate(full=True)
                arrays = [table[name].combine_chunks() for name in names]
                return [
                    array.dictionary_decode() if hasattr(array, "dictionary_decode") else array
                    for array in arrays
                ]
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise cut_off(self.file.path, f"row group {group}: {first_line(error)}") from None


def _bytes_of(column: Any) -> int:
    """Returns a lower bound of the memory of a column in a row group, from the file's metadata."""
    return max(
        column.total_uncompressed_size, column.num_values * _ITEM_BYTES.get(column.physical_type, 1)
    )


def _index_columns(names: Sequence[str], metadata: Mapping[bytes, bytes]) -> list[str]:
    """Returns the columns that hold a pandas index, as named by the file's metadata."""
    try:
        listed = json.loads(metadata.get(b"pandas", b"{}"))["index_columns"]
    except (ValueError, LookupError, TypeError):
        listed = []
    # a range is not a column
    written = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return [name for name in names if name in written or is_index(name)]


@dataclass(frozen=True, eq=False)
class RowGroups:
    """One column of numbers or of lists of equal length, (n, ...), or several columns of numbers,
    (n, columns)."""

    table: ParquetFile
    names: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    edges: np.ndarray = field(repr=False)

    @staticmethod
    def named(table: ParquetFile, names: list[str]) -> RowGroups:
        """Returns the columns, with dtype and shape of the first row group. Raises UserError if it
        contains anything but numbers."""
        first = _numbers(table, 0, names) if len(table.edges) > 1 else np.empty((0,))
        return RowGroups(
            table,
            tuple(names),
            whole(first.dtype),
            (int(table.edges[-1]), *first.shape[1:]),
            table.edges,
        )

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        numbers = _numbers(self.table, block, self.names)
        if numbers.shape[1:] != self.shape[1:] or numbers.dtype != self.dtype:
            what = f"{', '.join(self.names)} is {numbers.dtype} {numbers.shape[1:]} in "
            what += f"row group {block}, {self.dtype} {self.shape[1:]} in the first"
            raise UserError(
                what,
                str(self.table.file.path),
                "lists of the same length and type in the whole column",
            )
        return numbers[(slice(None), *box.slices)]


def _as_numbers(arrow_type: str, column: str) -> str:
    """Returns pandas code that converts a column to numbers."""
    if arrow_type.startswith("decimal"):
        return f"write it as floats: {column}.astype(float)"
    if "string" in arrow_type and not arrow_type.startswith(("list", "large_list", "fixed_size")):
        return f"write it as numbers: {column}.astype('category').cat.codes, over both sets at once"
    if arrow_type.startswith(("timestamp", "date")):
        return f"write it as numbers: pandas.to_datetime({column}).astype('int64')"
    return "write columns of numbers in its place"


def _fix_of_lengths(path: Path, name: str) -> str:
    rows = f"pyarrow.parquet.read_table({short(repr(str(path)), 60)})['{name}'].to_pylist()"
    return (
        f"lists of one length; or data.name=mine:rows {padded_by(name)} without the options of "
        f"data.name=parquet, and in mine.py def rows(split) that returns {{'{name}': "
        f"[np.array(row) for row in {rows}], ...}} (docs/own-data.md)"
    )


def _numbers(table: ParquetFile, group: int, names: Sequence[str]) -> np.ndarray:
    path = table.file.path
    columns = []
    for name, values in zip(names, table.read(group, names), strict=True):
        column = from_arrow(values, name, path.name, str(path), _fix_of_lengths(path, name))
        if column.dtype.kind not in "iufb":
            texts = [one for one in table.with_texts if one not in TARGETS]
            without = leaving_out(table.names, {*texts, *table.coordinates, name})
            raise UserError(
                f"column {name} is {values.type}, expected integers or floats",
                str(path),
                f"{_as_numbers(str(values.type), f'frame[{name!r}]')}; {without}; "
                "data.columns=auto also reads text and dates as x",
            )
        columns.append(column)
    rows = int(table.edges[group + 1] - table.edges[group])
    if any(len(column) != rows for column in columns):
        raise cut_off(
            path, f"row group {group} does not have the {rows} rows that the file declares"
        )
    if len(columns) == 1:
        return columns[0]
    wrong = next(
        (name for name, column in zip(names, columns, strict=True) if column.ndim > 1), None
    )
    if wrong is not None:
        raise UserError(
            f"column {wrong} contains lists, but shares its field with other columns",
            str(path),
            "give it a separate field in data.fields",
        )
    return np.stack(columns, axis=1)

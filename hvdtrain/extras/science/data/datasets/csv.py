"""Tables of text, .csv and .tsv: a job first finds the ends of their lines, and parses a block of
lines when a sample of it is read."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.field import TARGETS
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source, Split
from hvdtrain.data.user_data.arrays import is_index
from hvdtrain.errors import UserError, first_line, short
from hvdtrain.extras.science.columns.cells import (
    EXACT,
    NUMBER,
    is_int64,
    is_missing,
    kind_of,
    number,
    truth,
    whole_number,
)
from hvdtrain.extras.science.columns.options import column_options
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
)
from hvdtrain.extras.science.stored.text_tables.header import check_header, check_kind
from hvdtrain.extras.science.stored.text_tables.lines import (
    decoded,
    index_of_blocks,
    split_rows,
    without_blank_lines,
)
from hvdtrain.extras.science.texts_of_table import texts_of_table
from hvdtrain.extras.split_files.files import FileOnDisk

_MOST_HEADER = 2**20
_WORDS = {"tab": "\t", "space": " "}
_THOUSANDS = re.compile(r"[-+]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9.]*,[0-9]+")


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
    delimiter: str | None = None,
    columns: dict[str, str] | str | None = None,
    missing: Literal["error", "mean", "median", "drop", 0] = "error",
    rare: int = 0,
    text: str | None = None,
    target: str | None = None,
    tokenizer: Path | None = None,
    context: int | None = None,
    special_tokens: bool = True,
    pad_token: str | None = None,
) -> Source:
    """Columns of train.csv and val.csv in data.root, of several such files, or of one file with
    data.val_share or data.split_by.

    The first line has the names of the columns. A column of whole numbers, or of TRUE and FALSE
    (1 and 0), in the first lines is int64, any other column is float64.

    fields: the column of each field, {x: [height, width], y: label} (default: y, label, labels or
        target is y, all other columns are x)
    dtypes: number types that fields are converted to, {x: float32}
    split_by: a column that marks validation samples: by the words train and val, or by the values
        of split_val
    split_val: values of split_by that mark validation samples, and ranges of them, "2003:2005"
    cache_mb: most megabytes of parsed blocks that a rank keeps for each set
    delimiter: separator of columns, such as ; or tab or space (default: a comma; a tab in .tsv
        files)
    columns: kinds of columns of x, {visit: date, town: category, id: drop}: number, bool, date,
        category or drop; the kinds of other columns are detected (auto: of all columns); default:
        all columns of x are numbers
    missing: error rejects missing cells of x; mean, median or 0 replaces them and adds a number
        that marks them; drop leaves their rows out
    rare: categories that fewer training rows have are joined
    text: column with texts that are read as tokens, as by data.name=jsonl, instead of numbers
    target: column y of these texts (none: a language model predicts the tokens)
    tokenizer: tokenizer.json or a folder of transformers with it (none: each byte is a token)
    context: most tokens of a text that a model reads; longer ones are cut
    special_tokens: add special tokens to texts, as the tokenizer does
    pad_token: token for padding (default: pad_token of the tokenizer's folder, else its eos_token)

    Raises UserError if a line is damaged, with its number, and for columns without numbers.
    """

    suffixes = (".csv", ".tsv")

    def opened(path: Path) -> CsvFile:
        between = delimiter_of(delimiter) or ("\t" if path.suffix == ".tsv" else ",")
        return CsvFile.open(path, between, wanted)

    texts: dict[str, object] = {
        "text": text,
        "messages": None,
        "target": target,
        "tokenizer": tokenizer,
        "context": context,
        "special_tokens": special_tokens,
        "pad_token": pad_token,
    }
    numbers = {"fields": fields, "dtypes": dtypes, "split_by": split_by, "columns": columns}
    wanted = Wanted(fields)
    found = texts_of_table(
        name,
        root,
        split,
        suffixes,
        lambda path, names: _rows_of(opened(path), names),
        texts,
        numbers,
        cells=True,
    )
    if found is not None:
        return found
    encoded = column_options(columns, missing, rare)
    wanted = Wanted(fields, dtypes or {}, split_by, split_val, cache_mb, encoded)
    return build_stored(name, root, split, suffixes, opened, wanted)


def _rows_of(table: CsvFile, names: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Returns columns of texts, each row with its line."""
    columns, lines = table.texts(names)
    rows = (
        {name: cell or None for name, cell in zip(names, row, strict=True)}
        for row in zip(*columns, strict=True)
    )
    return zip(lines, rows, strict=True)


@dataclass(frozen=True, eq=False)
class CsvFile(StoredFile):
    file: FileOnDisk
    header: list[str]
    delimiter: str
    edges: np.ndarray  # int64 (blocks + 1,): rows
    offsets: np.ndarray  # int64 (blocks + 1,): bytes
    lines: np.ndarray  # int64 (blocks + 1,): of the file, for messages
    # the kind of each column, from its first lines: whole, float, truth, words, text, empty
    kinds: tuple[str, ...] = ()
    field_names: tuple[str, ...] = ()  # of each column; empty if it is in no field

    @staticmethod
    def open(path: Path, delimiter: str, wanted: Wanted) -> CsvFile:
        """Reads the file once, for the ends of its lines: a second for each GB. Raises UserError
        if it has no header."""
        if len(delimiter) != 1:
            raise OptionError(
                f"data.delimiter={delimiter!r:.40} is not a character",
                "delimiter",
                "one character, or the word tab or space",
            )
        file = FileOnDisk.at(path)
        with file.opened() as text:
            first, newline, _ = text.read(0, min(file.size, _MOST_HEADER)).partition(b"\n")
        check_kind(first, newline, path)
        cells = split_rows(
            decoded(first, path, 1).lstrip("\ufeff").rstrip("\r"), delimiter, path, 1
        )
        header = [
            column_name(name, place) for place, name in enumerate(cells[0][1] if cells else [])
        ]
        fields = _fields_of_columns(wanted)
        check_header(header, delimiter, path, {*TARGETS, *fields, wanted.split_by})
        rest = len(first) + 1
        index = index_of_blocks(file, rest, without_blank_lines(file, rest), delimiter)
        csv_file = CsvFile(file, header, delimiter, *index)
        rows = csv_file.rows(0) if csv_file.edges[-1] else []
        kinds = [kind_of([row[place].strip() for _, row in rows]) for place in range(len(header))]
        names = [fields.get(column, "") for column in header]
        if wanted.fields is None:
            names = ["y" if column in TARGETS else "x" for column in header]
        are_floats = [wanted.dtypes.get(name, "").startswith("float") for name in names]
        return replace(
            csv_file,
            kinds=tuple(
                "float" if kind == "whole" and is_float else kind
                for kind, is_float in zip(kinds, are_floats, strict=True)
            ),
            field_names=tuple(names),
        )

    @property
    def names(self) -> list[str]:
        return self.header

    @property
    def coordinates(self) -> Collection[str]:
        return [
            name
            for name, kind in zip(self.header, self.kinds, strict=True)
            if is_index(name) or (name.startswith("Unnamed: ") and kind == "empty")
        ]

    def note(self, name: str) -> str:
        is_truth = self.kinds[self.place(name)] == "truth"
        return f"column {name} has TRUE and FALSE, which are 1 and 0" if is_truth else ""

    def edges_of_texts(self, name: str, *, may_be_names: bool = False) -> np.ndarray | None:
        kind = self.kinds[self.place(name)]
        return self.edges if kind == "words" or (may_be_names and kind != "float") else None

    def array(self, name: str) -> StoredArray:
        return TextColumns.named(self, [name], True)

    def columns(self, names: list[str]) -> Blocks | None:
        return TextColumns.named(self, names, False)

    def values(self, name: str) -> np.ndarray:
        """Returns numbers, or strings without surrounding blanks."""
        place = self.place(name)
        blocks = range(len(self.edges) - 1)
        texts = [row[place].strip() for block in blocks for _, row in self.rows(block)]
        return (
            np.array([int(text) for text in texts], np.int64)
            if all(map(is_int64, texts))
            else np.array(texts, str)
        )

    def texts(self, names: Sequence[str]) -> Texts:
        places = [self.place(name) for name in names]
        columns: list[list[str]] = [[] for _ in names]
        lines = []
        for block in range(len(self.edges) - 1):
            for line, row in self.rows(block):
                lines.append(line)
                for column, place in zip(columns, places, strict=True):
                    column.append(row[place])
        return Texts(columns, lines)

    def place(self, name: str) -> int:
        if name not in self.header:
            raise no_such(f"column {name}", self.header, self.file.path)
        if self.header.count(name) > 1:
            raise UserError(
                f"the first line has two columns of the same name, {name}",
                f"{self.file.path}:1",
                "another name for one of them, or data.fields without them",
            )
        return self.header.index(name)

    def text(self, block: int) -> str:
        with self.file.opened() as file:
            raw = file.read(
                int(self.offsets[block]), int(self.offsets[block + 1] - self.offsets[block])
            )
        return decoded(raw, self.file.path, int(self.lines[block]))

    def rows(self, block: int) -> list[tuple[int, list[str]]]:
        """Returns rows, each with the line of the file where it begins. Raises UserError if a row
        does not have as many columns as the first line."""
        first = int(self.lines[block])
        rows = split_rows(self.text(block), self.delimiter, self.file.path, first)
        columns = len(self.header)
        wrong = next(((line, row) for line, row in rows if len(row) != columns), None)
        if wrong is None and len(rows) != self.edges[block + 1] - self.edges[block]:
            wrong = (first, [])
        if wrong is None:
            return rows
        line, row = wrong
        fix = "correct or remove it"
        if any("\n" in cell for cell in row):
            fix = "close the quote that begins in this line and continues in the next one"
        elif len(row) == columns + 1 > 2 and line == 2 and row[-1]:
            fix = "a name for the column of row names: R's write.table(col.names=NA)"
        elif len(row) > columns and not any(row[columns:]):
            fix = "remove the delimiter at the ends of lines, or add one to the first line"
        elif columns == 1 and len(row) > 1:
            fix = "names of the columns in the first line: remove what is above them"
        raise UserError(
            f"the line has {f'{len(row)} columns' if row else 'no column'}, the first line "
            f"{columns}",
            f"{self.file.path}:{line}",
            fix,
        )

    def wrong_cell(self, place: int, text: str, line: int, error: str, kind: str) -> UserError:
        """Returns the error for a cell that is not a number."""
        texts = [
            name
            for name, one in zip(self.header, self.kinds, strict=True)
            if (one == "words" and name not in TARGETS)
            or one in ("text", "empty")
            or name in self.coordinates
        ]
        without = leaving_out(self.header, {*texts, self.header[place]})
        is_input = self.field_names[place] == "x"
        if is_missing(text):
            fix = f"fill it, or remove the line; {without}"
            fix += "; data.missing=mean fills empty cells of x" if is_input else ""
        elif _THOUSANDS.fullmatch(text) and self.delimiter == ",":
            fix = (
                "1260 instead of 1,260: pandas.read_csv(FILE, thousands=',').to_csv(NEW, "
                "index=False)"
            )
        elif _DECIMAL_COMMA.fullmatch(text):
            thousands = ", thousands='.'" if "." in text else ""
            fix = (
                "a decimal point instead of the comma: pandas.read_csv(FILE, "
                f"sep={self.delimiter!r}, decimal=','{thousands}).to_csv(NEW, index=False), "
                "without data.delimiter"
            )
        elif self.kinds[place] == "whole" and NUMBER.fullmatch(text):
            fix = f"data.dtypes={{{self.field_names[place] or 'FIELD'}: float64}}"
        else:
            fix = f"a number in its place, or remove the line; {without}"
            fix += "; data.columns=auto also reads text and dates" if is_input else ""
        return UserError(
            f"column {short(self.header[place], 60)}: expected {kind}: {error}",
            f"{self.file.path}:{line}",
            fix,
        )


def delimiter_of(option: str | None) -> str | None:
    """Returns the character of the option data.delimiter; None if it is not set."""
    return _WORDS.get(option or "", option)


def column_name(text: str, place: int) -> str:
    """Returns a column's name without surrounding blanks; a column without a name is numbered, as
    in pandas."""
    return text.strip() or f"Unnamed: {place}"


def _fields_of_columns(wanted: Wanted) -> dict[str, str]:
    """Returns the field of each column that data.fields names."""
    return {
        name_and_words(text)[0]: field_name
        for field_name, texts in (wanted.fields or {}).items()
        for text in ([texts] if isinstance(texts, str) else texts)
    }


@dataclass(frozen=True, eq=False)
class TextColumns:
    """Columns of a table: a single one has shape (n,), several have shape (n, columns)."""

    table: CsvFile
    places: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    edges: np.ndarray = field(repr=False)

    @staticmethod
    def named(table: CsvFile, names: list[str], is_single: bool) -> TextColumns:
        """Returns the columns. Raises UserError if the first lines contain anything but numbers."""
        places = tuple(table.place(name) for name in names)
        samples = int(table.edges[-1])
        shape = (samples,) if is_single else (samples, len(names))
        is_whole = is_single and table.kinds[places[0]] in ("whole", "truth")
        dtype = np.dtype("int64" if is_whole else "float64")
        columns = TextColumns(table, places, dtype, shape, table.edges)
        if any(table.kinds[place] in ("words", "text", "empty") for place in places):
            columns._slowly(0)  # raises
        return columns

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        lines = self.table.text(block)
        rows = int(self.edges[block + 1] - self.edges[block])
        numbers = self._parsed(lines, rows)
        numbers = self._slowly(block) if numbers is None else numbers
        numbers = numbers[:, 0] if len(self.shape) == 1 else numbers
        return numbers[(slice(None), *box.slices)]

    def _parsed(self, lines: str, rows: int) -> np.ndarray | None:
        """Returns numbers (rows, columns); None if a line is malformed: loadtxt() would accept one
        with more columns."""
        if '"' in lines or any(
            line.count(self.table.delimiter) != len(self.table.header) - 1
            for line in lines.splitlines()
        ):
            return None
        # NumPy below 2.4 drops the fraction of integers with a point or an exponent
        is_rounded = self.dtype.kind == "i" and re.search("[.A-Za-z]", lines) is not None
        try:
            numbers = np.loadtxt(
                io.StringIO(lines),
                np.float64 if is_rounded else self.dtype,
                comments=None,
                delimiter=self.table.delimiter,
                usecols=self.places,
                quotechar='"',
                ndmin=2,
            )
        except (ValueError, IndexError, OverflowError):
            return None
        is_exact = numbers.dtype.kind == "i" or bool((np.abs(numbers) < EXACT).all())
        if len(numbers) != rows or not is_exact or (is_rounded and (numbers % 1 != 0).any()):
            return None
        return numbers.astype(self.dtype, copy=False)

    def _slowly(self, block: int) -> np.ndarray:
        """Parses numbers (rows, columns) cell by cell. Raises UserError with the line of a wrong
        cell."""
        is_whole = self.dtype.kind == "i"
        convert = whole_number if is_whole else number
        kind = "a whole number, as the first lines have" if is_whole else "a number"
        rows = []
        for line, row in self.table.rows(block):
            found = []
            for place in self.places:
                is_truth = self.table.kinds[place] == "truth"
                try:
                    found.append(truth(row[place]) if is_truth else convert(row[place]))
                except ValueError as error:
                    expected = "TRUE or FALSE, as the first lines have" if is_truth else kind
                    raise self.table.wrong_cell(
                        place, row[place].strip(), line, first_line(error), expected
                    ) from None
            rows.append(found)
        return np.array(rows, self.dtype)

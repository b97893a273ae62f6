"""Tables of text, .csv and .tsv: a job first finds the ends of their lines, and parses a block of
lines when a sample of it is read."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.own.arrays import is_index
from hvdtrain.data.source import Source, Split
from hvdtrain.data.stored.build import Wanted, build_stored
from hvdtrain.data.stored.files import FileOnDisk
from hvdtrain.data.stored.selection import Box
from hvdtrain.data.stored.stored_array import Blocks, StoredArray, no_such
from hvdtrain.errors import UserError, first_line, short

_BLOCK_BYTES = 2**17  # of text that is parsed at once
_PIECE_BYTES = 2**22  # of text that is searched for ends of lines at once
_MOST_HEADER = 2**20
_NEWLINE = 10
_MOST_LINE = 2**26  # bytes
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(
    r"[-+]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|nan|inf(inity)?)", re.IGNORECASE
)
_EXACT = 2.0**53  # a float64 has all whole numbers up to it


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    fields: dict[str, str | list[str]] | None = None,
    dtypes: dict[str, str] | None = None,
    split_by: str | None = None,
    split_val: list[int | str] | None = None,
    cache_mb: int = 256,
    delimiter: str | None = None,
) -> Source:
    """Columns of train.csv and val.csv in data.root, of several such files, or of one file with
    data.val_share or data.split_by.

    The first line has the names of the columns. A column of whole numbers in the first lines is
    int64, any other float64.

    fields: the column of each field, {x: [height, width], y: label} (default: y, label, labels or
        target is y, all other columns are x)
    dtypes: number types that fields are converted to, {x: float32}
    split_by: a column that tells validation samples from others: train, val; or the values of
        split_val
    split_val: values of split_by that validate
    cache_mb: most megabytes of parsed blocks that a rank keeps for each set
    delimiter: what stands between two columns (default: a comma, of .tsv a tab)

    Raises UserError where a line is damaged, with its number, and for columns without numbers.
    """

    def opened(path: Path) -> CsvFile:
        return CsvFile.of(path, delimiter or ("\t" if path.suffix == ".tsv" else ","))

    wanted = Wanted(fields, dtypes or {}, split_by, split_val, cache_mb)
    return build_stored(name, root, split, (".csv", ".tsv"), opened, wanted)


@dataclass(frozen=True, eq=False)
class CsvFile:
    file: FileOnDisk
    header: list[str]
    delimiter: str
    edges: np.ndarray  # int64 (blocks + 1,): rows
    offsets: np.ndarray  # int64 (blocks + 1,): bytes

    @staticmethod
    def of(path: Path, delimiter: str) -> CsvFile:
        """Reads the file once, for the ends of its lines: a second for each GB. Raises UserError
        where it has no header."""
        if len(delimiter) != 1:
            raise UserError(
                f"data.delimiter={delimiter!r:.40} is no character",
                "data.delimiter",
                "one character: ';'",
            )
        file = FileOnDisk.of(path)
        with file.opened() as text:
            first, newline, _ = text.read(0, min(file.size, _MOST_HEADER)).partition(b"\n")
        header = next(
            iter(
                _split(_text(first, path, 1).lstrip("\ufeff").rstrip("\r"), delimiter, f"{path}:1")
            ),
            [],
        )
        header = [name.strip() for name in header]
        if "" in header:
            wrong = "a column without a name"
        elif len(set(header)) < len(header):
            wrong = "two columns of the same name"
        else:
            wrong = ""
        if (
            not header
            or not newline
            or wrong
            or any(re.fullmatch(r"[-+.\deE]+", name) for name in header)
        ):
            what = (
                f"the first line has {wrong or 'no names of columns'}: "
                f"{short(first.decode(errors='replace'), 60)}"
            )
            raise UserError(
                what,
                f"{path}:1",
                "names of the columns in the first line (frame.to_csv(index=False)); "
                "data.delimiter=';' where that divides them",
            )
        return CsvFile(file, header, delimiter, *_index(file, len(first) + 1))

    @property
    def names(self) -> list[str]:
        return self.header

    @property
    def coordinates(self) -> Collection[str]:
        return [name for name in self.header if is_index(name)]

    def note(self, name: str) -> str:
        return ""

    def array(self, name: str) -> StoredArray:
        return TextColumns.of(self, [name], True)

    def columns(self, names: list[str]) -> Blocks | None:
        return TextColumns.of(self, names, False)

    def values(self, name: str) -> np.ndarray:
        """Numbers, or texts without blanks around them."""
        place = self.place(name)
        texts = [
            row[place].strip() for block in range(len(self.edges) - 1) for row in self.rows(block)
        ]
        return (
            np.array([int(text) for text in texts], np.int64)
            if all(map(is_int64, texts))
            else np.array(texts, str)
        )

    def place(self, name: str) -> int:
        if name not in self.header:
            raise no_such(f"column {name}", self.header, self.file.path)
        return self.header.index(name)

    def lines(self, block: int) -> str:
        with self.file.opened() as file:
            raw = file.read(
                int(self.offsets[block]), int(self.offsets[block + 1] - self.offsets[block])
            )
        return _text(raw, self.file.path, int(self.edges[block]) + 2)

    def rows(self, block: int) -> list[list[str]]:
        """Raises UserError for a line that has not as many columns as the first."""
        rows = _split(
            self.lines(block), self.delimiter, f"{self.file.path}:{self.edges[block] + 2}"
        )
        first = self.edges[block]
        last = self.edges[block + 1]
        wrong = next(
            (number for number, row in enumerate(rows) if len(row) != len(self.header)), None
        )
        if wrong is not None or len(rows) != last - first:
            line = int(first) + 2 + (wrong or 0)
            found = (
                "no column" if wrong is None or not rows[wrong] else f"{len(rows[wrong])} columns"
            )
            raise UserError(
                f"the line has {found}, the first line {len(self.header)}",
                f"{self.file.path}:{line}",
                "correct or remove it",
            )
        return rows


def number(text: str) -> float:
    """The float64 of a text. Raises ValueError for what is no number to every program, as 1_000,
    and for one that float64 does not have."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"could not convert {short(repr(text), 40)}")
    found = float(text)
    if math.isinf(found) and "inf" not in text.lower():
        raise ValueError(f"{short(text, 40)} is beyond the numbers of float64")
    if abs(found) >= _EXACT and _WHOLE.fullmatch(text) and int(found) != int(text):
        raise ValueError(f"{short(text, 40)} loses digits as a float64, {found:.0f}")
    return found


def whole_number(text: str) -> int:
    """The int64 of a text. Raises ValueError where it is none."""
    text = text.strip()
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"could not convert {short(repr(text), 40)}")
    if not is_int64(text):
        raise ValueError(f"{short(text, 40)} is beyond the numbers of int64")
    return int(text)


def is_int64(text: str) -> bool:
    if not _WHOLE.fullmatch(text):
        return False
    digits = text.lstrip("+-").lstrip("0") or "0"
    most = 2**63 if text.startswith("-") else 2**63 - 1
    return len(digits) < 20 and int(digits) <= most


def _split(lines: str, delimiter: str, where: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(lines, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise UserError(
            f"the lines from here on cannot be divided into columns: {error}",
            where,
            "correct the quotes and ends of lines",
        ) from None


def _text(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        number = line + raw.count(b"\n", 0, error.start)
        raise UserError(
            f"a byte is no UTF-8: {error.reason}",
            f"{path}:{number}",
            "convert the text: iconv -t UTF-8",
        ) from None


def _index(file: FileOnDisk, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of lines behind the header: their first rows and bytes, and the ends of the last
    one."""
    rows = 0
    edges = [0]
    offsets = [start]
    begin = start
    with file.opened() as text:
        for place in range(start, file.size, _PIECE_BYTES):
            raw = text.read(place, min(_PIECE_BYTES, file.size - place))
            ends = place + 1 + np.flatnonzero(np.frombuffer(raw, np.uint8) == _NEWLINE)
            blocks = np.flatnonzero(
                np.diff(
                    (ends - begin) // _BLOCK_BYTES, prepend=(offsets[-1] - begin) // _BLOCK_BYTES
                )
            )
            edges += [rows + int(number) + 1 for number in blocks]
            offsets += [int(end) for end in ends[blocks]]
            rows += len(ends)
        if file.size > start and text.read(file.size - 1, 1) != b"\n":
            rows += 1
    if offsets[-1] < file.size:
        edges, offsets = [*edges, rows], [*offsets, file.size]
    if len(long := np.flatnonzero(np.diff(offsets) > _MOST_LINE)):
        what = f"a line from here on has more than {_MOST_LINE:,} bytes"
        raise UserError(
            what, f"{file.path}:{edges[long[0]] + 2}", "a file whose lines end in a newline"
        )
    return np.array(edges, np.int64), np.array(offsets, np.int64)


@dataclass(frozen=True, eq=False)
class TextColumns:
    """Some columns of a table: one of shape (n,), or several of shape (n, columns)."""

    table: CsvFile
    places: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    edges: np.ndarray = field(repr=False)

    @staticmethod
    def of(table: CsvFile, names: list[str], is_single: bool) -> TextColumns:
        """Raises UserError where the first lines have something else than numbers."""
        places = tuple(table.place(name) for name in names)
        samples = int(table.edges[-1])
        shape = (samples,) if is_single else (samples, len(names))
        texts = [
            row[place].strip() for row in (table.rows(0) if samples else []) for place in places
        ]
        is_whole = all(map(_WHOLE.fullmatch, texts))
        return TextColumns(
            table,
            places,
            np.dtype("int64" if is_whole and is_single else "float64"),
            shape,
            table.edges,
        )

    def decode(self, block: int, box: Box) -> np.ndarray:
        lines = self.table.lines(block)
        rows = int(self.edges[block + 1] - self.edges[block])
        found = self._parsed(lines, rows)
        found = self._slowly(block) if found is None else found
        found = found[:, 0] if len(self.shape) == 1 else found
        return found[(slice(None), *box.slices)]

    def _parsed(self, lines: str, rows: int) -> np.ndarray | None:
        """Numbers (rows, columns); None where a line is not as it has to be: loadtxt() would take
        one with more columns."""
        if '"' in lines or any(
            line.count(self.table.delimiter) != len(self.table.header) - 1
            for line in lines.splitlines()
        ):
            return None
        try:
            found = np.loadtxt(
                io.StringIO(lines),
                self.dtype,
                comments=None,
                delimiter=self.table.delimiter,
                usecols=self.places,
                quotechar='"',
                ndmin=2,
            )
        except (ValueError, IndexError, OverflowError):
            return None
        is_exact = found.dtype.kind == "i" or bool((np.abs(found) < _EXACT).all())
        return found if len(found) == rows and is_exact else None

    def _slowly(self, block: int) -> np.ndarray:
        """Numbers (rows, columns). Raises UserError with the line that has none."""
        convert = whole_number if self.dtype.kind == "i" else number
        rows = []
        for line, row in enumerate(self.table.rows(block), int(self.edges[block]) + 2):
            try:
                rows.append([convert(row[place]) for place in self.places])
            except ValueError as error:
                kind = (
                    "a whole number, as the first lines have"
                    if convert is whole_number
                    else "a number"
                )
                what = f"expected {kind}: {first_line(error)}"
                fix = "correct it, leave the line out, or leave the column out of data.fields"
                raise UserError(what, f"{self.table.file.path}:{line}", fix) from None
        return np.array(rows, self.dtype)

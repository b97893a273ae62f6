"""The lines of a table: an index of blocks of lines, and their rows."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.extras.split_files.files import FileOnDisk

_BLOCK_BYTES = 2**17  # bytes of text to parse at a time
_PIECE_BYTES = 2**22  # bytes of text to search for line ends at a time
_NEWLINE = 10
_QUOTE = 34
_MOST_LINE = 2**26  # bytes


def without_blank_lines(file: FileOnDisk, start: int) -> int:
    """Returns the end of the last line that is not blank."""
    first = max(start, file.size - _BLOCK_BYTES)
    with file.opened() as text:
        tail = text.read(first, file.size - first)
    found = tail.rstrip(b"\r\n")
    if not found and first == start:
        return start
    newline = tail.find(b"\n", len(found))
    return first + (newline + 1 if newline >= 0 else len(tail))


def split_rows(text: str, delimiter: str, path: Path, first: int) -> list[tuple[int, list[str]]]:
    """Returns rows with the line number of each; first: the line number of the text."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = []
    line = first
    try:
        for row in reader:
            rows.append((line, row))
            line = first + reader.line_num
    except csv.Error as error:
        raise _undivided(error, path, line) from None
    return rows


def _undivided(error: csv.Error, path: Path, line: int) -> UserError:
    return UserError(
        f"the lines from here on cannot be divided into columns: {error}",
        f"{path}:{line}",
        "correct the quotes and ends of lines",
    )


def decoded(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        number = line + raw.count(b"\n", 0, error.start)
        raise UserError(
            f"a byte is not UTF-8: {error.reason}",
            f"{path}:{number}",
            "convert the text: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW (with its actual "
            "encoding)",
        ) from None


def index_of_blocks(
    file: FileOnDisk, start: int, stop: int, delimiter: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indexes blocks of rows after the header, which ends at byte `start`: their first rows, bytes
    and lines; the last one ends at `stop`. A row is a line unless there are newlines in quotes."""
    rows = 0
    edges = [0]
    offsets = [start]
    quotes = 0
    with file.opened() as text:
        for place in range(start, stop, _PIECE_BYTES):
            raw = np.frombuffer(text.read(place, min(_PIECE_BYTES, stop - place)), np.uint8)
            newlines = np.flatnonzero(raw == _NEWLINE)
            found = np.flatnonzero(raw == _QUOTE)
            if ((quotes + np.searchsorted(found, newlines)) % 2).any():
                return _index_of_quoted(file, start, stop, delimiter)
            quotes += len(found)
            blocks, ends = _last_rows(place + 1 + newlines, start, offsets[-1])
            edges += (rows + 1 + blocks).tolist()
            offsets += ends.tolist()
            rows += len(newlines)
        if stop > start and text.read(stop - 1, 1) != b"\n":
            rows += 1
    if offsets[-1] < stop:
        edges, offsets = [*edges, rows], [*offsets, stop]
    return _checked_blocks(file, np.array(edges), np.array(offsets), 2 + np.array(edges))


def _index_of_quoted(
    file: FileOnDisk, start: int, stop: int, delimiter: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Does the work of index_of_blocks() row by row, for a file with newlines in quotes: about a
    second for 100 MB."""
    last = []  # line of each row, counted from 1 after the header
    with file.path.open("rb") as raw:
        raw.seek(start)
        whole_text = io.TextIOWrapper(raw, "utf-8", errors="replace", newline="\n")
        reader = csv.reader(whole_text, delimiter=delimiter)
        try:
            last = [reader.line_num for _ in reader]
        except csv.Error as error:
            raise _undivided(error, file.path, reader.line_num + 1) from None
    with file.opened() as text:
        pieces = range(start, stop, _PIECE_BYTES)
        ends = [
            piece
            + 1
            + np.flatnonzero(
                np.frombuffer(text.read(piece, min(_PIECE_BYTES, stop - piece)), np.uint8)
                == _NEWLINE
            )
            for piece in pieces
        ]
    lines = np.concatenate(ends)
    if lines[-1] < stop:  # the last line has no newline
        lines = np.append(lines, stop)
    rows = np.array([line for line in last if line <= len(lines)])
    found, offsets = _last_rows(lines[rows - 1], start, start)
    edges = np.array([0, *(1 + found)])
    offsets = np.array([start, *offsets])
    if edges[-1] < len(rows):
        edges = np.append(edges, len(rows))
        offsets = np.append(offsets, stop)
    return _checked_blocks(file, edges, offsets, 2 + np.array([0, *last])[edges])


def _last_rows(ends: np.ndarray, start: int, before: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that end a block, and their end bytes. ends: end bytes of the rows; before:
    end of the previous block."""
    blocks = np.flatnonzero(
        np.diff((ends - start) // _BLOCK_BYTES, prepend=(before - start) // _BLOCK_BYTES)
    )
    return blocks, ends[blocks]


def _checked_blocks(
    file: FileOnDisk, edges: np.ndarray, offsets: np.ndarray, lines: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if len(long := np.flatnonzero(np.diff(offsets) > _MOST_LINE)):
        what = f"a line from here on has more than {_MOST_LINE:,} bytes"
        fix = "a file whose lines end in a newline"
        raise UserError(what, f"{file.path}:{lines[long[0]]}", fix)
    return edges.astype(np.int64), offsets.astype(np.int64), lines.astype(np.int64)

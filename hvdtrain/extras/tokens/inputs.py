"""The documents of text, JSON-lines and Parquet files, divided into portions that are tokenized
independently."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvdtrain.core.folder import check_regular
from hvdtrain.errors import UserError, first_line, nearest, short

Kind = Literal["text", "lines", "table"]
_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "table",
}
_MOST_TEXT_BYTES = 2**30  # of a document, which is in memory with its tokens


class InputFile(NamedTuple):
    """A file of documents, in the state in which the command found it."""

    name: str  # as the user named it, or with its path in a folder
    kind: Kind
    size: int
    mtime_ns: int


class Part(NamedTuple):
    """Some documents of a file: the bytes [begin, end) of a text, the lines that begin in these
    bytes, or the row groups [begin, end) of a table."""

    file: InputFile
    begin: int
    end: int
    bytes: int


Portion = list[Part]  # what becomes one file of tokens


class InputDocument(NamedTuple):
    text: str
    where: str  # for messages


def find_inputs(names: Sequence[str]) -> list[InputFile]:
    """Returns the files in the order of the command line, those of folders sorted by path. Raises
    UserError for a file of another kind."""
    found: list[InputFile] = []
    for name in names:
        path = Path(name)
        if not path.is_dir():
            found.append(_input(path))
            continue
        inside = sorted(
            Path(folder) / file
            for folder, _, files in os.walk(path)
            for file in files
            if Path(file).suffix in _KINDS and not file.startswith(".")
        )
        if not inside:
            raise UserError(
                f"the folder has no files {', '.join(_KINDS)}", name, "another folder, or FILES"
            )
        found += map(_input, inside)
    return found


def _input(path: Path) -> InputFile:
    kind = _KINDS.get(path.suffix)
    if kind is None:
        raise UserError(
            f"files {path.suffix or 'without a suffix'} are not supported",
            str(path),
            f"one of {', '.join(_KINDS)}; a text of any name: a link NAME.txt",
        )
    try:
        status = check_regular(path)
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror or error}", str(path), "the path of a file"
        ) from None
    return InputFile(str(path), kind, status.st_size, status.st_mtime_ns)


def check_unchanged(file: InputFile) -> None:
    """Raises UserError if a file is not as the command found it."""
    try:
        now = _input(Path(file.name))
    except UserError:
        now = None
    if now != file:
        raise UserError(
            "the file has changed since the command began",
            file.name,
            "the same command, once nobody writes to it",
        )


def portions_of(files: Sequence[InputFile], most_bytes: int, field: str) -> list[Portion]:
    """Divides the documents of all files, in order, into portions of about `most_bytes`. The
    portions depend on the files only, not on ranks. field: the column of tables."""
    portions: list[Portion] = []
    room = 0
    for file in files:
        for part in _parts_of(file, most_bytes, field):
            if part.bytes > room or not portions:
                portions.append([])
                room = most_bytes
            portions[-1].append(part)
            room -= part.bytes
    return portions


def _parts_of(file: InputFile, most_bytes: int, field: str) -> Iterator[Part]:
    if file.kind == "text":
        yield Part(file, 0, file.size, file.size)
    elif file.kind == "lines":
        for begin in range(0, file.size, most_bytes):
            end = min(begin + most_bytes, file.size)
            yield Part(file, begin, end, end - begin)
    else:
        groups = _table(file, field).metadata
        for group in range(groups.num_row_groups):
            yield Part(file, group, group + 1, _column_bytes(groups.row_group(group), field))


def _column_bytes(group: Any, field: str) -> int:
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(one.total_uncompressed_size for one in columns if one.path_in_schema == field)


def documents_in(part: Part, field: str) -> Iterator[InputDocument]:
    """Yields the documents of a part. field: of JSON lines, or column of tables. Raises UserError
    for a document that is not text, with its place."""
    if part.file.kind == "text":
        yield _whole_text(part.file)
    elif part.file.kind == "lines":
        yield from _lines(part, field)
    else:
        yield from _rows(part, field)


def _whole_text(file: InputFile) -> InputDocument:
    if file.size > _MOST_TEXT_BYTES:
        raise UserError(
            f"a text of {file.size:,} bytes is one document, and the most are {_MOST_TEXT_BYTES:,}",
            file.name,
            "several files; or JSON lines, one document in each line",
        )
    return InputDocument(_decoded(Path(file.name).read_bytes(), file.name), file.name)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start} is not UTF-8: {error.reason}",
            where,
            "convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW (with its actual encoding)",
        ) from None


def _lines(part: Part, field: str) -> Iterator[InputDocument]:
    with Path(part.file.name).open("rb") as file:
        place = part.begin
        if place:
            file.seek(place - 1)
            place += len(file.readline()) - 1  # the rest of a line that began before
        while place < part.end:
            line = file.readline()
            if not line:
                break
            if line.strip():
                where = f"{part.file.name}, the line at byte {place:,}"
                yield InputDocument(_field_of(line, field, where), where)
            place += len(line)


def _field_of(line: bytes, field: str, where: str) -> str:
    try:
        found = json.loads(_decoded(line, where).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"the line is not JSON: {first_line(error)}",
            where,
            'a JSON object in each line: {"text": "..."}',
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            "the line is not a JSON object", where, 'a JSON object in each line: {"text": "..."}'
        )
    if field not in found:
        known = short(", ".join(found), 200) or "none"
        raise UserError(
            f"the record has no field {field}; it has {known}",
            where,
            f"--text FIELD; {nearest(field, list(found))}" if found else "remove the line",
        )
    return _text(found[field], field, where)


def _text(found: object, field: str, where: str) -> str:
    if not isinstance(found, str):
        raise UserError(
            f"field {field} is {short(repr(found), 40)}, expected text",
            where,
            "correct it, or --text FIELD for another field",
        )
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"field {field} has \\u{ord(found[error.start]):04x}, which is half of a character",
            where,
            "correct or remove it",
        ) from None
    return found


def _table(file: InputFile, field: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet files need the pyarrow package", file.name, "pip install 'hvdtrain[parquet]'"
        ) from None
    try:
        table = pyarrow.parquet.ParquetFile(file.name)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"the Parquet file is damaged: {first_line(error)}", file.name, "copy it again"
        ) from None
    if field not in (columns := table.schema_arrow.names):
        raise UserError(
            f"the table has no column {field}; it has {short(', '.join(columns), 200)}",
            file.name,
            f"--text COLUMN; {nearest(field, columns)}",
        )
    return table


def _rows(part: Part, field: str) -> Iterator[InputDocument]:
    table = _table(part.file, field)
    number = sum(table.metadata.row_group(group).num_rows for group in range(part.begin))
    for group in range(part.begin, part.end):
        for batch in table.iter_batches(1024, row_groups=[group], columns=[field]):
            for cell in batch.column(0).to_pylist():
                where = f"{part.file.name}, row {number:,}"
                yield InputDocument(_text(cell, field, where), where)
                number += 1

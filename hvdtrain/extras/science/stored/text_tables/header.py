"""The first line of a table, with the names of its columns."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hvdtrain.data.field import TARGETS
from hvdtrain.errors import UserError, short
from hvdtrain.extras.science.columns.cells import NUMBER, WHOLE

_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def check_kind(first: bytes, newline: bytes, path: Path) -> None:
    """Raises UserError for a file that is not text in lines."""
    if first.startswith(b"\x1f\x8b"):
        raise UserError("the file is compressed", str(path), f"gunzip -k {path}, and that file")
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            "the text is UTF-16", f"{path}:1", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
        )
    if not newline and b"\r" in first:
        raise UserError(
            "the lines end in carriage returns without newlines",
            f"{path}:1",
            "convert them to newlines: tr '\\r' '\\n' < FILE > NEW",
        )
    if not newline:
        raise UserError(
            "the file has no lines below the names of the columns",
            f"{path}:1",
            "the names in the first line, and a line for each sample",
        )


def check_header(
    header: list[str], delimiter: str, path: Path, known: Collection[str | None]
) -> None:
    """Raises UserError if the first line has no names, or is divided by another delimiter.

    known: names that show that it is not a line of numbers.
    """
    shown = short(delimiter.join(header), 60)
    numbers = [name for name in header if any(map(str.isdigit, name)) and NUMBER.fullmatch(name)]
    # beside a name, whole numbers may be column names: label,0,1,2
    are_cells = len(numbers) == len(header) or not all(map(WHOLE.fullmatch, numbers))
    if not header or (are_cells and not set(known) & set(header)):
        raise UserError(
            f"the first line has no names of columns: {shown}",
            f"{path}:1",
            "names of the columns in the first line (frame.to_csv(index=False))",
        )
    if len(header) > 1:
        return
    for other, name in _DELIMITERS.items():
        if other in header[0]:
            word = "tab" if other == "\t" else f"'{other}'"
            comma = "; numbers need a decimal point" if other == ";" else ""
            raise UserError(
                f"the first line is a single column that contains {name}: {shown}",
                f"{path}:1",
                f"data.delimiter={word}{comma}",
            )
    if set(TARGETS) & set(header[0].split()):
        raise UserError(
            f"the first line is a single column that contains spaces: {shown}",
            f"{path}:1",
            "data.delimiter=space if one space separates columns; otherwise use commas",
        )

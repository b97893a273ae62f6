"""Output of commands: numbers and tables for people, --json, and a standard output whose reader may
exit."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError, short


def plural(count: int, noun: str) -> str:
    """Formats a count: 1 rank, 2 ranks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def align(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    gap: str = "  ",
    least: Sequence[int] = (),
) -> list[str]:
    """Aligns the cells of a table: returns a line for each row, with cells as wide as their column.

    left: the columns that are aligned to the left, all others to the right; least: the smallest
    widths of the first columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[: len(least)] = map(max, widths, least)
    sides = [str.ljust if column in left else str.rjust for column in range(len(widths))]
    return [
        gap.join(
            side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


STANDARD_OUTPUT = "-"


def with_json_value(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments, with `-` inserted after a --json without a value: if the next argument
    is missing, an option or key=value.

    Raises UserError if its value is a folder: otherwise the error would come after all work, and
    the folder may be a RUN argument.
    """
    completed: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        completed.append(argument)
        name, equals, value = argument.partition("=")
        if name != "--json":
            continue
        value = value if equals else following
        if os.path.isdir(value):
            fix = "a file: --json=FILE; or --json - for the standard output"
            raise UserError(
                f"{short(value)} is a folder, and --json takes it for its FILE", "--json", fix
            )
        if not equals and value != STANDARD_OUTPUT and (value.startswith("-") or "=" in value):
            completed.append(STANDARD_OUTPUT)
    return completed


def print_result(json_path: str | None, lines: Sequence[str], result: Mapping[str, Any]) -> None:
    """On rank 0: prints the text and writes the JSON file; with "-" as the path, prints the JSON
    instead of the text.

    Raises UserError if the file cannot be written.
    """
    as_json = json.dumps(result)
    print(as_json if json_path == STANDARD_OUTPUT else "\n".join(lines), flush=True)
    if json_path is not None and json_path != STANDARD_OUTPUT:
        try:
            Path(json_path).write_text(as_json + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot write {json_path}: {error.strerror}",
                "--json",
                "give a file that can be written, or -",
            ) from None


class StandardOutput(io.FileIO):
    """Drops output after an error: silently for a closed pipe (`| head -3`), otherwise after
    raising UserError.

    is_job: the output is not the purpose of the program, so it does not raise UserError, either.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_job = False
        self._is_lost = False

    def write(self, data: Any) -> int:
        try:
            return len(data) if self._is_lost else super().write(data)
        except BrokenPipeError:
            self._is_lost = True
        except OSError as error:
            self._is_lost = not self.is_job  # a disk may have room later
            if not self.is_job:
                what = f"cannot write to the standard output: {os.strerror(error.errno or 0)}"
                raise UserError(
                    what,
                    os.path.realpath(f"/dev/fd/{self.fileno()}"),
                    "another file, or room on its disk",
                ) from None
        return len(data)


def open_standard_output() -> StandardOutput | None:
    """Replaces sys.stdout if it is a file; otherwise returns None.

    Characters that its encoding lacks are written as \\u65e5, as on the standard error. Complete
    lines are written immediately, so that the output of a model appears in order among the lines of
    the job.
    """
    old = sys.stdout
    if type(old) is not io.TextIOWrapper:
        return None
    old.flush()
    raw = StandardOutput(old.fileno())
    errors = "backslashreplace" if old.errors == "strict" else old.errors
    buffer = raw if old.write_through else io.BufferedWriter(raw)  # write_through: PYTHONUNBUFFERED
    sys.stdout = io.TextIOWrapper(
        buffer, old.encoding, errors, line_buffering=True, write_through=old.write_through
    )
    return raw

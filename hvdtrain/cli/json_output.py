"""--json of plan, check, bench and evaluate: a file or the standard output, and the result that goes there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError, short

STANDARD_OUTPUT = "-"


def with_json_value(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `-` behind a --json that has no value: where the next argument is an option or key=value, or is missing.

    Raises UserError where its value is a folder: that would be noticed when all work is done, or is the RUN of another argument.
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
            raise UserError(f"{short(value)} is a folder, and --json takes it for its FILE", "--json", fix)
        if not equals and value != STANDARD_OUTPUT and (value.startswith("-") or "=" in value):
            completed.append(STANDARD_OUTPUT)
    return completed


def print_result(json_path: str | None, lines: Sequence[str], result: Mapping[str, Any]) -> None:
    """On rank 0: prints the text and writes the JSON file; with "-" as the path, prints the JSON instead of the text.

    Raises UserError where the file cannot be written.
    """
    as_json = json.dumps(result)
    print(as_json if json_path == STANDARD_OUTPUT else "\n".join(lines), flush=True)
    if json_path is not None and json_path != STANDARD_OUTPUT:
        try:
            Path(json_path).write_text(as_json + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {json_path}: {error.strerror}", "--json", "give a file that can be written, or -") from None

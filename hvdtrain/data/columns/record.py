"""The file of a run folder that says what the columns of its table become."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.core.folder import Folder
from hvdtrain.data.columns.encoding import Encoding, LearnedColumn
from hvdtrain.data.columns.options import KINDS
from hvdtrain.errors import UserError

FILE = "columns.json"
_MOST_FILE_BYTES = 2**24


def to_json(encoding: Encoding) -> bytes:
    """Returns the content of the file in a run folder."""
    columns = [asdict(column) for column in encoding.columns]
    return json.dumps({"columns": columns}, indent=1).encode() + b"\n"


def from_json(content: bytes, where: str) -> Encoding:
    """Reads an encoding from to_json()'s content. Raises UserError if the content is damaged."""
    try:
        columns = json.loads(content)["columns"]
        return Encoding(tuple(_column_of(column) for column in columns))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"the file does not say how columns are encoded: {error}",
            where,
            "restore it from a copy",
        ) from None


def _column_of(entry: Mapping[str, Any]) -> LearnedColumn:
    """Reads a column. Raises ValueError, LookupError or TypeError if a value is impossible."""
    found = LearnedColumn(
        entry["name"],
        entry["kind"],
        entry["fill"],
        entry["missing"],
        tuple(entry["categories"]),
        tuple(entry["rare"]),
        entry["is_distinct"],
    )
    texts = (found.name, *found.categories, *found.rare)
    if (
        found.kind not in KINDS
        or not all(isinstance(text, str) for text in texts)
        or not (found.fill is None or (isinstance(found.fill, float) and math.isfinite(found.fill)))
        or not isinstance(found.missing, int)
        or (found.missing and found.fill is None)
    ):
        raise ValueError(f"impossible column {found.name!r:.60}")
    return found


def encoding_of_run(run: Path) -> Encoding | None:
    """Returns what the columns of a run's table become; None if it was not trained with
    data.columns. Raises UserError if the file is damaged."""
    try:
        with Folder.open(run) as folder:
            content = folder.read(FILE, _MOST_FILE_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"it cannot be read: {error}", str(run / FILE), "restore it from a copy"
        ) from None
    return from_json(content, str(run / FILE))

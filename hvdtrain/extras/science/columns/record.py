"""The file of a run folder that says what the columns of its table become."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.extras.science.columns.encoding import Encoding, LearnedColumn
from hvdtrain.extras.science.columns.options import KINDS


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

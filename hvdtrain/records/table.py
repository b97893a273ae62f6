"""Tables of a report's page, and how they show values. Extras define tables of their own."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

MOST_RANKS = 32  # rows: the slowest ranks


class Table(NamedTuple):
    """Cells as they are shown; the page escapes them."""

    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def filled(self) -> Table:
        """Returns the table without columns that are empty in all rows."""
        kept = [
            column for column in range(len(self.header)) if any(row[column] for row in self.rows)
        ]
        return Table(
            [self.header[column] for column in kept],
            [[row[column] for column in kept] for row in self.rows],
            self.note,
        )


def shown(value: float, form: str = "") -> str:
    """Formats with four digits, or all digits of a whole number, unless a format is given; empty
    for NaN."""
    if not math.isfinite(value):
        return ""
    return format(value, form or (",.0f" if abs(value) >= 1000 else ".4g"))


def percent(value: float) -> str:
    """Formats as a percentage; empty for NaN."""
    return f"{100 * value:.2f}%" if math.isfinite(value) else ""


def cell(value: Any) -> str:
    """Returns a value of JSON or YAML; text without quotes, nothing for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)

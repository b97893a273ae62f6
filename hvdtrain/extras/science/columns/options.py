"""The options data.columns, data.missing and data.rare of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hvdtrain.data.option_error import OptionError

Kind = Literal["number", "bool", "date", "category"]
Missing = Literal["error", "mean", "median", "drop", 0]
KINDS: tuple[Kind, ...] = get_args(Kind)
DROP = "drop"


@dataclass(frozen=True)
class ColumnOptions:
    """How the columns of x are read."""

    kinds: Mapping[str, str]  # of columns whose detected kind is overridden; drop: not in x
    missing: Missing = "error"
    rare: int = 0  # categories with fewer training rows share one number

    @property
    def fills(self) -> bool:
        """Whether a missing cell has a value that replaces it."""
        return self.missing not in ("error", "drop")


def column_options(
    columns: str | Mapping[str, str] | None, missing: Missing, rare: int
) -> ColumnOptions | None:
    """Returns the options; None if none is set, and a table has numbers only. Raises OptionError
    for an unknown kind."""
    if isinstance(columns, str) and columns != "auto":
        raise OptionError(
            f"data.columns={columns!r:.40} names no kind of each column",
            "columns",
            "data.columns=auto, or {COLUMN: KIND}; a kind is " + ", ".join((*KINDS, DROP)),
        )
    if missing not in get_args(Missing):
        raise OptionError(
            f"data.missing={missing!r:.40} is not a way to fill missing cells",
            "missing",
            f"one of {', '.join(map(str, get_args(Missing)))}",
        )
    if rare < 0:
        raise OptionError(f"data.rare={rare} is not a number of rows", "rare", "0 or more")
    if columns is None and missing == "error" and not rare:
        return None
    kinds = {} if columns is None or isinstance(columns, str) else dict(columns)
    for name, kind in kinds.items():
        if kind not in (*KINDS, DROP):
            raise OptionError(
                f"data.columns has {name:.60} as {kind!r:.40}",
                "columns",
                f"one of {', '.join((*KINDS, DROP))}",
            )
    return ColumnOptions(kinds, missing, rare)

"""The numbers that columns become, with the fill values and categories that were learned."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import short
from hvdtrain.extras.science.columns.cells import number
from hvdtrain.extras.science.columns.options import KINDS, Kind
from hvdtrain.extras.science.columns.problems import Problems
from hvdtrain.extras.science.columns.raw_table import RawColumn, RawTable

DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TRUTH = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}


def _finite(text: str) -> float:
    parsed = number(text)
    if not math.isfinite(parsed):
        raise ValueError("it is not finite")
    return parsed


def _truth(text: str) -> float:
    found = TRUTH.get(text.lower())
    return float(["0", "1"].index(text)) if found is None else found  # ValueError


def _days(text: str) -> float:
    """Days since 1970 in UTC, with the time of the day as a fraction."""
    if not DATE.fullmatch(text):
        raise ValueError("it is not like 2024-05-31 or 2024-05-31T12:30")
    moment = datetime.fromisoformat(text)
    moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) / timedelta(days=1)


_READ: dict[Kind, Callable[[str], float]] = {"number": _finite, "bool": _truth, "date": _days}
_NAMES = {"number": "a number", "bool": "true or false", "date": "a date"}


class Encoded(NamedTuple):
    """The numbers of a column, for each of its different texts."""

    numbers: np.ndarray  # float64 (texts, features)
    # bool (texts,): a category that no training row has, or a missing cell that nothing marks
    unknown: np.ndarray


@dataclass(frozen=True)
class LearnedColumn:
    """The encoding of a column, learned from the training rows."""

    name: str
    kind: Kind
    fill: float | None = None  # what replaces a missing cell; None: that is an error
    missing: int = 0  # training rows without a value
    categories: tuple[str, ...] = ()  # sorted; an empty last category is for missing cells
    rare: tuple[str, ...] = ()  # categories that share one number
    is_distinct: bool = False  # a different whole number in each row, as an identifier has

    @property
    def features(self) -> tuple[str, ...]:
        """A name of each number."""
        if self.kind == "category":
            names = [f"{self.name}={text or 'missing'}" for text in self.categories]
            return (*names, *([f"{self.name}=rare"] if self.rare else []))
        return (self.name, *([f"{self.name} is missing"] if self.missing else []))

    def encode(self, column: RawColumn, rows: np.ndarray, problems: Problems) -> Encoded:
        """Encodes the texts in these rows, int64 (n,); numbers of other texts are 0. Adds errors to
        the problems."""
        used = column.counts(rows) > 0
        found = np.zeros((len(column.texts), len(self.features)))
        unknown = np.zeros(len(column.texts), bool)
        if used[:1].any() and not column.texts[0] and self.fill is None:
            problems.add_missing(self.name, column, rows)
            used[0] = False
        wrong = []
        places = {text: place for place, text in enumerate(self.categories)}
        places |= dict.fromkeys(self.rare, len(self.categories))
        for place in np.flatnonzero(used).tolist():
            text = column.texts[place]
            if self.kind == "category":
                unknown[place] = text not in places
                feature = places.get(text, len(self.categories) if self.rare else None)
                if feature is not None:
                    found[place, feature] = 1.0
            elif not text and self.fill is not None:
                found[place, 0] = self.fill
                found[place, 1:] = 1.0  # what marks it, if training rows lack values
                unknown[place] = not self.missing
            else:
                try:
                    found[place, 0] = _READ[self.kind](text)
                except ValueError:
                    wrong.append(place)
        if wrong:
            problems.add_unread(self.name, column, rows, wrong, _NAMES[self.kind])
        return Encoded(found, unknown)


@dataclass(frozen=True)
class Encoding:
    """The encodings of the columns of x, in their order."""

    columns: tuple[LearnedColumn, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """A name of each number of x."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(
        self,
        table: RawTable,
        rows: np.ndarray,
        where: str,
        kinds: Mapping[str, str] | None = None,
    ) -> list[Encoded]:
        """Encodes what these rows have, column by column. Raises UserError with all problems;
        kinds: as in Problems()."""
        problems = Problems(table, kinds)
        found = [
            column.encode(table.columns[column.name], rows, problems) for column in self.columns
        ]
        problems.check(where)
        return found

    def lines(self) -> list[str]:
        """Describes the columns and what replaces missing cells, for the header."""
        kinds = {kind: [column for column in self.columns if column.kind == kind] for kind in KINDS}
        shown = [
            f"{kind} {short(', '.join(map(_summary, of_kind)), 150)}"
            for kind, of_kind in kinds.items()
            if of_kind
        ]
        lines = [f"x has {len(self.features)} numbers from {'; '.join(shown)}"]
        lacking = [column for column in self.columns if column.missing]
        filled = [
            f"{column.name} {column.missing:,} (by {column.fill:.6g})"
            for column in lacking
            if column.kind != "category"
        ]
        others = [
            f"{column.name} {column.missing:,}" for column in lacking if column.kind == "category"
        ]
        if filled:
            shown_names = short(", ".join(filled), 300)
            lines.append(f"missing cells of the training set, replaced and marked: {shown_names}")
        if others:
            lines.append(f"missing cells that are a category: {short(', '.join(others), 300)}")
        if names := [column.name for column in self.columns if column.is_distinct]:
            lines.append(
                f"a different whole number in each row: {short(', '.join(names), 100)}; of an "
                f"identifier, data.columns={{{names[0]}: drop}} leaves it out"
            )
        return lines


def _summary(column: LearnedColumn) -> str:
    if column.kind != "category":
        return f"{column.name} (days since 1970)" if column.kind == "date" else column.name
    rare = f" and {len(column.rare)} rare" if column.rare else ""
    return f"{column.name} ({len(column.categories)}{rare})"


def numbers_of(table: RawTable, encoded: Sequence[Encoded], rows: np.ndarray) -> np.ndarray:
    """Returns the numbers of some rows, int64 (n,), as float64 (n, features)."""
    columns = zip(table.columns.values(), encoded, strict=True)
    return np.concatenate([one.numbers[column.rows[rows]] for column, one in columns], axis=1)


def lines_of_unknown(
    table: RawTable, encoded: Sequence[Encoded], rows: np.ndarray
) -> Iterator[str]:
    """Yields a line for each column with categories or missing values that no training row has."""
    for (name, column), one in zip(table.columns.items(), encoded, strict=True):
        unknown = one.unknown[column.rows[rows]]
        if not unknown.any():
            continue
        text = column.texts[column.rows[rows[unknown.argmax()]]]
        some = "1 row has" if unknown.sum() == 1 else f"{int(unknown.sum()):,} rows have"
        yield (
            f"{some} a category of {short(name, 60)} that no training row has, such as "
            f"{short(repr(text), 40)}"
            if text
            else f"{some} no {short(name, 60)}, but all training rows do: nothing marks them"
        )

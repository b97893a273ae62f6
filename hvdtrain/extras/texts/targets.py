"""The targets of records: names of classes, class numbers, or numbers to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.errors import UserError, short
from hvdtrain.extras.texts.record import Label

_MOST_NAMES = 2**16


class Targets(NamedTuple):
    """The target of each record."""

    y: np.ndarray  # int64 or float64 (n,)
    class_names: tuple[str, ...] = ()  # of y; empty if the targets are numbers


class TargetReader:
    """Collects the targets of records in order, which are all names or all numbers."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._numbers: dict[str, int] = {}  # of each name, in the order of their first lines
        self._found: list[int | float] = []
        self._first = ""  # where the first one is
        self._is_name = False

    def add(self, label: Label, where: str) -> None:
        """Adds the next target. Raises UserError if it is a number and others are names."""
        is_name = isinstance(label, str)
        if not self._found:
            self._first = where
            self._is_name = is_name
        if is_name != self._is_name:
            kinds = ("a name", "a number")
            raise UserError(
                f"field {self._field} is {short(repr(label), 40)}, "
                f"{kinds[not is_name]}, and {kinds[is_name]} in {self._first}",
                where,
                "names everywhere, or numbers everywhere",
            )
        if not isinstance(label, str):
            self._found.append(label)
            return
        self._found.append(self._numbers.setdefault(label, len(self._numbers)))
        if len(self._numbers) > _MOST_NAMES:
            raise UserError(
                f"field {self._field} has more than {_MOST_NAMES:,} different texts: are they "
                "classes?",
                where,
                "data.target=FIELD, another field",
            )

    def targets(self, class_names: Sequence[str] | None, where: str) -> Targets:
        """Returns the targets. class_names: of the training set; None: of these records, sorted.

        Raises UserError for a class that the training set does not have.
        """
        if self._found and not self._is_name:
            if class_names:
                raise UserError(
                    f"field {self._field} is a number, and the name of a class in the training "
                    f"set: {short(', '.join(class_names), 200)}",
                    self._first,
                    "names in both sets, or numbers in both",
                )
            return Targets(np.array(self._found))
        names = sorted(self._numbers) if class_names is None else list(class_names)
        known = {name: number for number, name in enumerate(names)}
        if unknown := sorted(self._numbers.keys() - known.keys()):
            raise UserError(
                f"field {self._field} has the class {short(repr(unknown[0]), 60)}, which the "
                f"training set does not have: {short(', '.join(names), 200) or 'it has numbers'}",
                where,
                "the same classes in both sets",
            )
        places = np.array([known[name] for name in self._numbers], np.int64)
        return Targets(places[np.array(self._found, np.int64)], tuple(names))


def kind_of_cells(cells: Iterable[str]) -> Callable[[str], Label]:
    """Returns what converts the cells of a column of text: int or float if each of them is such a
    number, else str."""
    kind: type[int] | type[float] = int
    for cell in cells:
        if kind is int and not _is_of(int, cell):
            kind = float
        if kind is float and not _is_of(float, cell):
            return str
    return kind


def _is_of(kind: type[int] | type[float], cell: str) -> bool:
    try:
        kind(cell)
    except ValueError:
        return False
    return True

"""model.thaw: rules that do not update a parameter while it is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hvdtrain.core.adapters import is_adapter
from hvdtrain.core.progress import Hyper
from hvdtrain.optim.groups import number_of_group
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class Thawed:
    """Applies `rule` from a step on; before it, weights and state do not change. h.step counts from
    that step, and is negative before."""

    rule: Rule
    entry: int  # number of the entry in model.thaw

    @property
    def momentum(self) -> float:
        return self.rule.momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        return (P, state) if h.step < 0 else self.rule.update(g, state, P, h, ops)


class ThawEntries(NamedTuple):
    """The entry of model.thaw for each weight, by name; weights that are never frozen have none."""

    patterns: tuple[tuple[str, ...], ...]  # patterns of each entry
    frozen: tuple[str, ...]  # patterns of model.freeze
    trained: tuple[str, ...] | None  # with model.lora: patterns of weights that it does not freeze
    ties: tuple[tuple[str, ...], ...] = ()  # the names of each array with several names

    def is_frozen(self, name: str) -> bool:
        """Whether a weight is frozen at the start, by any of its names."""
        names = next((tied for tied in self.ties if name in tied), (name,))
        by_lora = self.trained is not None and not (
            is_adapter(name) or _any_fits(names, self.trained)
        )
        return by_lora or _any_fits(names, self.frozen)

    def number_of(self, name: str) -> int | None:
        return number_of_entry(name, self.patterns) if self.is_frozen(name) else None


def _any_fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


@dataclass(frozen=True)
class Thawing:
    """Applies `rule` to every parameter; to parameters that an entry thaws, from a step on."""

    rule: Rule
    entries: ThawEntries

    @property
    def momentum(self) -> float:
        return self.rule.momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        rule = self.rule.of_parameter(name, shape, excluded)
        number = self.entries.number_of(name)
        return rule if number is None else Thawed(rule, number)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        return self.rule.update(g, state, P, h, ops)


def number_of_entry(name: str, entries: Sequence[Sequence[str]]) -> int | None:
    """Returns the number of the first entry of model.thaw with a pattern that the name matches."""
    return next(
        (
            number
            for number, patterns in enumerate(entries)
            if number_of_group(name, patterns) is not None
        ),
        None,
    )

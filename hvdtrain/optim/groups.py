"""Groups of parameters by their names, each with a share of the rate and of the decay, and a momentum of its own: optim.groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.rule import Array, Ops, Rule


class Group(NamedTuple):
    """Factors of the parameters whose name fits a pattern."""

    names: str  # with * for any characters, ? for one
    rate: float  # times the rate of the others
    decay: float  # times their weight decay
    momentum: float | None  # in the place of theirs


@dataclass(frozen=True)
class Scaled:
    """`rule` at a share of the rate and of the weight decay; own_momentum: in the place of the job's, where it is not None."""

    rule: Rule
    rate: float = 1.0
    decay: float = 1.0
    own_momentum: float | None = None

    def __str__(self) -> str:
        shares = f"{type(self.rule).__name__.lower()} at {self.rate:g} of the rate"
        shares += f", {self.decay:g} of the decay" if self.decay != 1 else ""
        return shares + (f", momentum {self.own_momentum:g}" if self.own_momentum is not None else "")

    @property
    def momentum(self) -> float:
        return self.rule.momentum if self.own_momentum is None else self.own_momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops) -> tuple[Array, tuple[Any, ...]]:
        momentum = h.momentum if self.own_momentum is None else self.own_momentum
        own = h._replace(lr=h.lr * self.rate, weight_decay=h.weight_decay * self.decay, momentum=momentum)
        return self.rule.update(g, state, P, own, ops)


@dataclass(frozen=True)
class Grouped:
    """`rule` for every parameter, scaled as the first group says that its name fits."""

    rule: Rule
    groups: tuple[Group, ...]

    @property
    def momentum(self) -> float:
        return self.rule.momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        rule, number = self.rule.of_parameter(name, shape, excluded), number_of_group(name, [group.names for group in self.groups])
        if number is None:
            return rule
        group = self.groups[number]
        if isinstance(rule, Scaled):  # what optim.name=muon leaves to another rule
            momentum = rule.own_momentum if group.momentum is None else group.momentum
            return replace(rule, rate=rule.rate * group.rate, decay=rule.decay * group.decay, own_momentum=momentum)
        return Scaled(rule, group.rate, group.decay, group.momentum)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops) -> tuple[Array, tuple[Any, ...]]:
        return self.rule.update(g, state, P, h, ops)


def number_of_group(name: str, patterns: Sequence[str]) -> int | None:
    """Number of the first pattern that a parameter's name fits."""
    return next((number for number, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), None)

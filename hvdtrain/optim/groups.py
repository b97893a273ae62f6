"""optim.groups: rules that change learning rate, weight decay and momentum for some parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase, translate
from typing import Any, NamedTuple

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.rule import Array, Ops, Rule


class ParameterGroup(NamedTuple):
    """Factors for the parameters whose name matches a pattern."""

    names: str  # with * for any characters, ? for one
    rate: float  # factor on the job's rate
    decay: float  # factor on the job's weight decay
    momentum: float | None  # instead of the job's
    layer_rate: float | None = (
        # rate of a layer divided by the rate of the next layer; the number of a layer is what #
        # matches in `names`
        None
    )
    layers: int = 0  # number of layers, with layer_rate

    def rate_of(self, name: str) -> float:
        """Returns the rate factor of a matching parameter: `rate`, or in layer n rate
        layer_rate^(layers - 1 - n).

        Layer-wise decay as in Clark et al. 2020, arXiv:2003.10555, table 6, where every layer has a
        different rate.
        """
        if self.layer_rate is None:
            return self.rate
        layer = number_of_layer(name, self.names)
        assert layer is not None, (name, self.names)
        return self.rate * self.layer_rate ** (self.layers - 1 - layer)


@dataclass(frozen=True)
class ScaledRule:
    """`rule` with scaled rate and weight decay. own_momentum: replaces the job's momentum unless
    None."""

    rule: Rule
    rate: float = 1.0
    decay: float = 1.0
    own_momentum: float | None = None

    def __str__(self) -> str:
        shares = f"{type(self.rule).__name__.lower()} at {self.rate:g} of the rate"
        shares += f", {self.decay:g} of the decay" if self.decay != 1 else ""
        return shares + (
            f", momentum {self.own_momentum:g}" if self.own_momentum is not None else ""
        )

    @property
    def momentum(self) -> float:
        return self.rule.momentum if self.own_momentum is None else self.own_momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        momentum = h.momentum if self.own_momentum is None else self.own_momentum
        own = h._replace(
            lr=h.lr * self.rate, weight_decay=h.weight_decay * self.decay, momentum=momentum
        )
        return self.rule.update(g, state, P, own, ops)


@dataclass(frozen=True)
class Grouped:
    """`rule` for every parameter, scaled by the first group whose pattern its name matches."""

    rule: Rule
    groups: tuple[ParameterGroup, ...]

    @property
    def momentum(self) -> float:
        return self.rule.momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        rule = self.rule.of_parameter(name, shape, excluded)
        number = number_of_group(name, [group.names for group in self.groups])
        if number is None:
            return rule
        group = self.groups[number]
        if isinstance(rule, ScaledRule):  # optim.name=muon updates these parameters by another rule
            momentum = rule.own_momentum if group.momentum is None else group.momentum
            return replace(
                rule,
                rate=rule.rate * group.rate_of(name),
                decay=rule.decay * group.decay,
                own_momentum=momentum,
            )
        return ScaledRule(rule, group.rate_of(name), group.decay, group.momentum)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return self.rule.init(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        return self.rule.update(g, state, P, h, ops)


def number_of_group(name: str, patterns: Sequence[str]) -> int | None:
    """Returns the number of the first pattern that a parameter's name matches."""
    return next((number for number, pattern in enumerate(patterns) if fits(name, pattern)), None)


def fits(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern with * for any characters, ? for one, # for a number."""
    return (
        fnmatchcase(name, pattern)
        if "#" not in pattern
        else number_of_layer(name, pattern) is not None
    )


def number_of_layer(name: str, pattern: str) -> int | None:
    """Returns the number that the first # of a pattern matches in a name; None if the name does not
    match."""
    found = re.match(translate(pattern).replace(r"\#", "(\\d+)"), name)
    return int(found[1]) if found else None

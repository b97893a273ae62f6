"""Rules around another rule: optim.groups, shares of the rate, the decay and the momentum for some;
optim.ema, averages of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase, translate
from typing import Any, NamedTuple, TypeVar

from hvdtrain.core.adapters import is_adapter
from hvdtrain.core.progress import Hyper
from hvdtrain.optim.rule import Array, Ops, Rule


class ParameterGroup(NamedTuple):
    """Factors of the parameters whose name fits a pattern."""

    names: str  # with * for any characters, ? for one
    rate: float  # times the rate of the others
    decay: float  # times their weight decay
    momentum: float | None  # in the place of theirs
    layer_rate: float | None = (
        # rate of a layer over that of the next one, by the number that # stands for in `names`
        None
    )
    layers: int = 0  # with layer_rate

    def rate_of(self, name: str) -> float:
        """The factor of a parameter that fits; in layer n rate layer_rate^(layers - 1 - n).

        Layer-wise decay: Clark et al. 2020, arXiv:2003.10555, table 6, where every layer has a rate
        of its own.
        """
        if self.layer_rate is None:
            return self.rate
        layer = number_of_layer(name, self.names)
        assert layer is not None, (name, self.names)
        return self.rate * self.layer_rate ** (self.layers - 1 - layer)


@dataclass(frozen=True)
class ScaledRule:
    """`rule` at a share of the rate and of the weight decay; own_momentum: in the place of the
    job's, where it is not None."""

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
    """`rule` for every parameter, scaled as the first group says that its name fits."""

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
        if isinstance(rule, ScaledRule):  # what optim.name=muon leaves to another rule
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


@dataclass(frozen=True)
class Thawed:
    """`rule` from a step on; before it weights and state stay as they are. h.step counts from that
    step, and is negative before."""

    rule: Rule
    entry: int  # of model.thaw

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
    """Which entry of model.thaw a weight has, by its name: weights that are never frozen have
    none."""

    patterns: tuple[tuple[str, ...], ...]  # of each entry
    frozen: tuple[str, ...]  # patterns of model.freeze
    trained: tuple[str, ...] | None  # with model.lora: patterns of what it does not freeze
    ties: tuple[tuple[str, ...], ...] = ()  # the names of each array that has several

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
    """`rule` for every parameter, from a step on for those that an entry thaws."""

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
    """Number of the first entry of model.thaw with a pattern that a name fits."""
    return next(
        (
            number
            for number, patterns in enumerate(entries)
            if number_of_group(name, patterns) is not None
        ),
        None,
    )


def number_of_group(name: str, patterns: Sequence[str]) -> int | None:
    """Number of the first pattern that a parameter's name fits."""
    return next((number for number, pattern in enumerate(patterns) if fits(name, pattern)), None)


def fits(name: str, pattern: str) -> bool:
    """Whether a name is of a pattern with * for any characters, ? for one, # for a number."""
    return (
        fnmatchcase(name, pattern)
        if "#" not in pattern
        else number_of_layer(name, pattern) is not None
    )


def number_of_layer(name: str, pattern: str) -> int | None:
    """What the first # of a pattern stands for in a name; None where the name does not fit."""
    found = re.match(translate(pattern).replace(r"\#", "(\\d+)"), name)
    return int(found[1]) if found else None


T = TypeVar("T")


@dataclass(frozen=True)
class Averaged:
    """`rule`, and the mean of the weights after each step, of which that of a step t steps ago
    counts decay^t.

    The weights of these add up to 1, so the mean is of trained weights alone from the first step
    on: a <- a + (p - a) (1 - d) / c with c <- d c + 1 - d from c = 0 (Polyak and Juditsky 1992; the
    correction is that of Adam, Kingma and Ba 2015, section 3). Behind the state of the rule are a,
    and c as one number of each parameter.
    """

    rule: Rule
    decay: float

    @property
    def momentum(self) -> float:
        return self.rule.momentum

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return replace(self, rule=self.rule.of_parameter(name, shape, excluded))

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return (*self.rule.init(p, ops), ops.zeros_like(p), ops.zero(p))

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        *own, average, total = state
        P, new_state = self.rule.update(g, tuple(own), P, h, ops)
        total = self.decay * total + (1 - self.decay)
        share = (1 - self.decay) / total
        return P, (*new_state, ops.axpy(share, P, ops.scale(1 - share, average)), total)


def without_average(rule: Rule) -> Rule:
    """What computes the weights."""
    return rule.rule if isinstance(rule, Averaged) else rule


def averages(arrays: Mapping[str, T]) -> dict[str, T]:
    """The averages in a state, in arrays called s.PARAMETER.0, .1, ...: each parameter's, by the
    name of its weights, p.PARAMETER.

    The last array of each is c, the one before it a.
    """
    last: dict[str, int] = {}
    for name in arrays:
        kind, _, rest = name.partition(".")
        parameter, _, number = rest.rpartition(".")
        if kind == "s" and parameter and number.isdecimal():
            last[parameter] = max(int(number), last.get(parameter, 0))
    found = {parameter: f"s.{parameter}.{number - 1}" for parameter, number in last.items()}
    return {f"p.{parameter}": arrays[name] for parameter, name in found.items() if name in arrays}

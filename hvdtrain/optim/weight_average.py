"""optim.ema: a rule that keeps an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.rule import Array, Ops, Rule

T = TypeVar("T")


@dataclass(frozen=True)
class Averaged:
    """Applies `rule` and keeps a running mean of the weights after each step. The weights t steps
    ago have the factor decay^t.

    The coefficients sum to 1, so from the first step on the mean contains only trained weights: a
    <- a + (p - a) (1 - d) / c with c <- d c + 1 - d from c = 0 (Polyak and Juditsky 1992; the
    correction is Adam's, Kingma and Ba 2015, section 3). The state is the state of the rule,
    followed by a, and by c as one number for each parameter.
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
    """Returns the wrapped rule that computes the weights."""
    return rule.rule if isinstance(rule, Averaged) else rule


def averages(arrays: Mapping[str, T]) -> dict[str, T]:
    """Returns the averages in a state by the name of the weights, p.PARAMETER. The arrays of a
    state are s.PARAMETER.0, .1, ...

    The last array of a parameter is c, and the array before it is a.
    """
    last: dict[str, int] = {}
    for name in arrays:
        kind, _, rest = name.partition(".")
        parameter, _, number = rest.rpartition(".")
        if kind == "s" and parameter and number.isdecimal():
            last[parameter] = max(int(number), last.get(parameter, 0))
    found = {parameter: f"s.{parameter}.{number - 1}" for parameter, number in last.items()}
    return {f"p.{parameter}": arrays[name] for parameter, name in found.items() if name in arrays}

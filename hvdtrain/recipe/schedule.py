"""Schedules: frozen values that map epochs done to a number, so that a configuration prints and compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[float], float]  # epochs done, with the fraction -> value


@dataclass(frozen=True)
class Constant:
    """The same value for ever."""

    value: float

    def __call__(self, epochs: float) -> float:
        return self.value


@dataclass(frozen=True)
class Warmup:
    """Rises linearly from 0 at epoch 0 to `then` at epoch `epochs`, and follows `then` from there (Goyal 2017, arXiv:1706.02677, 2.2).

    A step's value is taken before the step, so the first step of a warm-up moves nothing and fills the momentum.
    """

    epochs: float
    then: Schedule

    def __call__(self, epochs: float) -> float:
        value = self.then(epochs)
        return value if epochs >= self.epochs else value * (epochs / self.epochs)

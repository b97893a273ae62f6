"""recipe.schedule=plateau: lowers the learning rate if evaluations do not improve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field, WrapValidator

from hvdtrain.core.metrics import Better

# infinities as strings, because JSON has no such numbers
INFINITIES = {
    "inf": math.inf,
    "-inf": -math.inf,
}


def _number_of(value: Any, number: Callable[[Any], float]) -> float:
    return INFINITIES[value] if isinstance(value, str) and value in INFINITIES else number(value)


NumberOrInfinity = Annotated[float, Field(allow_inf_nan=False), WrapValidator(_number_of)]
LEAST_CHANGE = 1e-8  # smaller changes of a rate are not made; eps in torch


class Plateau(NamedTuple):
    """The state of the rule after a job's evaluations. A step's rate depends only on this state and
    on the position in the job."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0  # factor on the recipe's rate
    best: NumberOrInfinity | None = None
    bad: Annotated[int, Field(ge=0, lt=2**63)] = 0  # consecutive evaluations without improvement
    cooldown: Annotated[int, Field(ge=0, lt=2**63)] = (
        0  # coming evaluations that are not counted as bad
    )


@dataclass(frozen=True)
class PlateauRule:
    """Multiplies the rate by gamma after more than `patience` consecutive evaluations without
    improvement.

    It follows torch.optim.lr_scheduler.ReduceLROnPlateau and uses its names, except that factor is
    gamma and min_lr is recipe.end_lr.
    """

    peak: float  # the rate after the warm-up
    begin: float  # epochs done at the end of the warm-up; earlier evaluations are ignored
    gamma: float
    patience: int
    threshold: float
    is_relative: bool  # threshold_mode=rel
    cooldown: int
    least: float  # the lowest rate, as a share of the peak

    def after(self, state: Plateau, epochs: float, value: float, better: Better) -> Plateau:
        """Returns the state after an evaluation with this value, at `epochs` epochs done."""
        if epochs < self.begin:
            return state
        share, best, bad, cooldown = state
        if self._is_better(value, best, better):
            best = value
            bad = 0
        else:
            bad += 1
        if cooldown:
            cooldown = cooldown - 1
            bad = 0
        if bad > self.patience:
            lower = max(share * self.gamma, self.least)
            share = lower if (share - lower) * self.peak > LEAST_CHANGE else share
            cooldown = self.cooldown
            bad = 0
        return Plateau(share, best, bad, cooldown)

    def _is_better(self, value: float, best: float | None, better: Better) -> bool:
        if best is None:
            return not math.isnan(value)
        sign = 1 if better == "max" else -1
        least = (
            best * (1 + sign * self.threshold) if self.is_relative else best + sign * self.threshold
        )
        return value > least if better == "max" else value < least

"""Learning rate schedules: functions of the epochs done, a real number."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.errors import UserError, short

Schedule = Callable[[float], float]  # epochs done, a real number -> value of the next step


@dataclass(frozen=True)
class Constant:
    """A schedule with one value at every epoch."""

    value: float

    def __call__(self, epochs: float) -> float:
        return self.value


@dataclass(frozen=True)
class Steps:
    """`value`, multiplied by gamma at each milestone (ascending epochs). The step that starts at a
    milestone has the new value."""

    value: float
    milestones: tuple[float, ...]
    gamma: float

    def __call__(self, epochs: float) -> float:
        return self.value * self.gamma ** bisect.bisect_right(self.milestones, epochs)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave from `value` at epoch `begin` to `end` at epoch `finish` (Loshchilov,
    Hutter 2016, arXiv:1608.03983, eq. 5)."""

    value: float
    end: float
    begin: float
    finish: float

    def __call__(self, epochs: float) -> float:
        done = _fraction(epochs, self.begin, self.finish)
        return self.end + (self.value - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine wave from `start` to `top` at epoch `turn`, and another one to `end` at epoch
    `finish`.

    Source: Smith, Topin 2017, arXiv:1708.07120, in the form of torch.optim.lr_scheduler.OneCycleLR
    (anneal_strategy="cos"), except that the end is reached after the last step, as in every
    schedule here, and not at it.
    """

    start: float
    top: float
    end: float
    turn: float
    finish: float

    def __call__(self, epochs: float) -> float:
        if epochs < self.turn:
            return Cosine(self.start, self.top, 0.0, self.turn)(epochs)
        return Cosine(self.top, self.end, self.turn, self.finish)(epochs)


@dataclass(frozen=True)
class UsersSchedule:
    """`peak` times a user's function of the completed share of the job."""

    peak: float
    function: Callable[[float], float]
    finish: float
    where: str

    def __call__(self, epochs: float) -> float:
        """Returns the rate. Raises UserError if the function does not return a valid factor."""
        share = _fraction(epochs, 0.0, self.finish)
        factor = self.function(share)
        try:
            found = float(factor)
        except (TypeError, ValueError):
            found = math.nan
        if not 0 <= found < math.inf:
            what = f"the schedule returns {short(repr(factor))} after {share:.3g} of the job"
            raise UserError(
                what,
                self.where,
                "a function that takes a number from 0 to 1 and returns a factor of the rate, 0 "
                "or more",
            )
        return self.peak * found


@dataclass(frozen=True)
class Polynomial:
    """end + (value - end) (1 - done)^power from epoch `begin` to epoch `finish` (You et al. 2017,
    arXiv:1708.03888, with power 2)."""

    value: float
    end: float
    begin: float
    finish: float
    power: float

    def __call__(self, epochs: float) -> float:
        return (
            self.end
            + (self.value - self.end)
            * (1 - _fraction(epochs, self.begin, self.finish)) ** self.power
        )


@dataclass(frozen=True)
class Exponential:
    """value gamma^((epochs - begin) / per): decays smoothly by gamma every `per` epochs, from epoch
    `begin` on."""

    value: float
    gamma: float
    begin: float
    per: float = 1.0

    def __call__(self, epochs: float) -> float:
        return float(self.value * self.gamma ** (max(0.0, epochs - self.begin) / self.per))


@dataclass(frozen=True)
class Chain:
    """Consecutive schedules: pieces[i] applies from starts[i] on. All of them count epochs from the
    beginning of the job."""

    starts: tuple[float, ...]
    pieces: tuple[Schedule, ...]

    def __call__(self, epochs: float) -> float:
        return self.pieces[max(0, bisect.bisect_right(self.starts, epochs) - 1)](epochs)


@dataclass(frozen=True)
class AtLeast:
    """The value of `schedule`, but never less than `least`."""

    least: float
    schedule: Schedule

    def __call__(self, epochs: float) -> float:
        return max(self.least, self.schedule(epochs))


@dataclass(frozen=True)
class Warmup:
    """Rises linearly from `start` towards the value of `then` until `epochs`, then equals `then`.

    Goyal 2017, arXiv:1706.02677, 2.2: gradual warm-up. The first step has `start`; with start 0 it
    changes no weight and fills the momentum.
    """

    epochs: float
    start: float
    then: Schedule

    def __call__(self, epochs: float) -> float:
        value = self.then(epochs)
        return (
            value
            if epochs >= self.epochs
            else self.start + (value - self.start) * (epochs / self.epochs)
        )


@dataclass(frozen=True)
class ConstantWarmup:
    """`start` before `epochs`, then equal to `then` (Goyal 2017, arXiv:1706.02677, 2.2, constant
    warm-up)."""

    epochs: float
    start: float
    then: Schedule

    def __call__(self, epochs: float) -> float:
        return self.then(epochs) if epochs >= self.epochs else self.start


def _fraction(epochs: float, begin: float, finish: float) -> float:
    """Returns the completed fraction of the way from `begin` to `finish`, 0 to 1."""
    return min(1.0, max(0.0, (epochs - begin) / (finish - begin)))

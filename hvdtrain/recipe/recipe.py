"""Recipe: every number of a step as a pure function of progress; the schedules of its rate, and
what evaluations make of it, in order."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, WrapValidator

from hvdtrain.core.metrics import Better
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.errors import UserError, short
from hvdtrain.recipe.batch import Growth
from hvdtrain.recipe.noise import noise_variance

Schedule = Callable[[float], float]  # epochs done, with the fraction -> value of the next step
Scale = Literal["linear", "sqrt", "none"]
# by their words in JSON, which has no such numbers
INFINITIES = {
    "inf": math.inf,
    "-inf": -math.inf,
}


def _number_of(value: Any, number: Callable[[Any], float]) -> float:
    return INFINITIES[value] if isinstance(value, str) and value in INFINITIES else number(value)


NumberOrInfinity = Annotated[float, Field(allow_inf_nan=False), WrapValidator(_number_of)]
LEAST_CHANGE = 1e-8  # of a rate, below which it stays: eps of torch


@dataclass(frozen=True)
class Recipe:
    """Learning rate, batch and noise of each step, equal on every rank."""

    lr: Schedule  # for the first batch
    batch: Growth  # samples over all ranks
    momentum: float
    weight_decay: float
    epochs: float  # of the whole job; infinity where only its time ends it
    lr_follows_batch: Scale = "none"  # how the rate scales where the batch grows
    base_batch: int = 1  # global batch whose gradient noise sample_noise=1 reproduces
    sample_noise: float = 0.0
    gradient_noise: float = 0.0
    local_from: float = 0.0  # epochs done where comm.local_steps begins
    plateau: PlateauRule | None = None  # of recipe.schedule=plateau
    momentum_cycle: Schedule | None = None  # in the place of `momentum`
    thaw: tuple[int, ...] = ()  # as Hyper's

    def at(self, progress: Progress) -> Hyper:
        """The numbers of the step that follows `progress`."""
        batch = self.batch(progress.epochs)
        return Hyper(
            lr=self.lr(progress.epochs) * scaling(self.lr_follows_batch, batch, self.batch.first),
            momentum=self.momentum
            if self.momentum_cycle is None
            else self.momentum_cycle(progress.epochs),
            weight_decay=self.weight_decay,
            batch=batch,
            step=progress.step,
            noise=noise_variance(self.gradient_noise, progress.step),
            sample_noise=math.sqrt(self.sample_noise * max(0.0, batch / self.base_batch - 1.0)),
            thaw=self.thaw,
            together=progress.epochs < self.local_from,
        )

    def after_evaluations(self, hyper: Hyper, state: Plateau) -> Hyper:
        """The numbers of a step, at(), as evaluations have changed them up to it."""
        return hyper if self.plateau is None else hyper._replace(lr=hyper.lr * state.share)

    def judge(self, state: Plateau, progress: Progress, value: float, better: Better) -> Plateau:
        """The state after an evaluation with this value of the objective."""
        return (
            state
            if self.plateau is None
            else self.plateau.after(state, progress.epochs, value, better)
        )


def scaling(scale: Scale, batch: int, base_batch: int) -> float:
    """The factor by which a learning rate for base_batch is multiplied.

    linear: batch / base_batch (Goyal et al. 2017, arXiv:1706.02677, 2.1). sqrt: its square root
    (Krizhevsky 2014, arXiv:1404.5997, 5.1).
    """
    if scale == "none":
        return 1.0
    return batch / base_batch if scale == "linear" else math.sqrt(batch / base_batch)


@dataclass(frozen=True)
class Constant:
    """A schedule with one value at every epoch."""

    value: float

    def __call__(self, epochs: float) -> float:
        return self.value


@dataclass(frozen=True)
class Steps:
    """`value`, multiplied by gamma at each milestone (epochs, rising): the step that starts at a
    milestone has the new value."""

    value: float
    milestones: tuple[float, ...]
    gamma: float

    def __call__(self, epochs: float) -> float:
        return self.value * self.gamma ** bisect.bisect_right(self.milestones, epochs)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `value` at epoch `begin` to `end` at epoch `finish` (Loshchilov, Hutter
    2016, arXiv:1608.03983, eq. 5)."""

    value: float
    end: float
    begin: float
    finish: float

    def __call__(self, epochs: float) -> float:
        done = _fraction(epochs, self.begin, self.finish)
        return self.end + (self.value - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine from `start` to `top` at epoch `turn`, and another one to `end` at epoch
    `finish`.

    Source: Smith, Topin 2017, arXiv:1708.07120, in the form of torch.optim.lr_scheduler.OneCycleLR
    (anneal_strategy="cos"), whose last step is one before its total_steps; here, as in every
    schedule, the end is after the last step.
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
    """`peak` times what the user's function gives for the share of the job that is done."""

    peak: float
    function: Callable[[float], float]
    finish: float
    where: str

    def __call__(self, epochs: float) -> float:
        """Raises UserError where the function gives no number, or one that is no factor."""
        share = _fraction(epochs, 0.0, self.finish)
        factor = self.function(share)
        try:
            found = float(factor)
        except (TypeError, ValueError):
            found = math.nan
        if not 0 <= found < math.inf:
            what = f"the schedule gives {short(repr(factor))} after {share:.3g} of the job"
            raise UserError(
                what,
                self.where,
                "a function of one number, 0 to 1, that gives a factor of the rate, 0 or more",
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
    """value gamma^((epochs - begin) / per): multiplied by gamma every `per` epochs from epoch
    `begin` on, evenly by step."""

    value: float
    gamma: float
    begin: float
    per: float = 1.0

    def __call__(self, epochs: float) -> float:
        return float(self.value * self.gamma ** (max(0.0, epochs - self.begin) / self.per))


@dataclass(frozen=True)
class Chain:
    """Schedules one after the other: from starts[i] on, pieces[i]. All of them count epochs from
    the beginning of the job."""

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
    """Before `epochs` rises linearly from `start` towards the value of `then`; from there on equal
    to `then`.

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
    """`start` before `epochs`, from there on equal to `then` (Goyal 2017, arXiv:1706.02677, 2.2,
    constant warm-up)."""

    epochs: float
    start: float
    then: Schedule

    def __call__(self, epochs: float) -> float:
        return self.then(epochs) if epochs >= self.epochs else self.start


def _fraction(epochs: float, begin: float, finish: float) -> float:
    """The fraction of the way from `begin` to `finish` that is done, 0 to 1."""
    return min(1.0, max(0.0, (epochs - begin) / (finish - begin)))


class Plateau(NamedTuple):
    """What the evaluations of a job have come to. With the position in the job it is all that the
    rate of a step depends on."""

    share: Annotated[float, Field(ge=0, le=1)] = (
        1.0  # of the rate that the recipe has at a position
    )
    best: NumberOrInfinity | None = None
    bad: Annotated[int, Field(ge=0, lt=2**63)] = 0  # evaluations in a row without a better one
    cooldown: Annotated[int, Field(ge=0, lt=2**63)] = (
        0  # evaluations to come that are not counted as bad
    )


@dataclass(frozen=True)
class PlateauRule:
    """The rate is multiplied by gamma after more than `patience` evaluations in a row without a
    better one.

    The rule of torch.optim.lr_scheduler.ReduceLROnPlateau, whose names these are; its factor is
    gamma, and min_lr recipe.end_lr.
    """

    peak: float  # the rate after the warm-up
    begin: float  # epochs done at the end of the warm-up: evaluations before it are not looked at
    gamma: float
    patience: int
    threshold: float
    is_relative: bool  # threshold_mode=rel
    cooldown: int
    least: float  # share of the peak

    def after(self, state: Plateau, epochs: float, value: float, better: Better) -> Plateau:
        """After an evaluation of this value, at `epochs` epochs done."""
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

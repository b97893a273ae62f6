"""The forecast of a job without running a step: its steps on any number of ranks, and the memory of
its weights on a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.sampler import largest_share
from hvdtrain.errors import UserError
from hvdtrain.optim.rule import ArrayOps, Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.batch import BatchPhase, batch_phases, resolve_batch_size, steps_until
from hvdtrain.recipe.clock import clock, total_samples
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.training.build import build_recipe
from hvdtrain.training.conflicts import refuse_on_every_engine
from hvdtrain.training.input import passes_of_step

Shapes = Mapping[str, tuple[int, ...]]  # shapes of the trained parameters, by name


@dataclass(frozen=True)
class Forecast:
    """A whole job on `ranks` ranks."""

    ranks: int
    config: Config
    recipe: Recipe
    dataset: int  # training samples
    context: int | None  # tokens of each sample, if samples have tokens
    batch_phases: tuple[BatchPhase, ...]

    @property
    def steps(self) -> int:
        last = self.batch_phases[-1]
        return last.first_step + int(last.steps)

    @property
    def epochs(self) -> float:
        """The epochs of the job."""
        return min(self.recipe.epochs, self.progress(self.steps).epochs)

    def progress(self, step: int) -> Progress:
        """Returns the progress of the job after `step` steps."""
        phase = next(phase for phase in reversed(self.batch_phases) if phase.first_step <= step)
        samples = phase.samples + (step - phase.first_step) * phase.batch
        return Progress(self.dataset, total_samples(self.config, self.dataset), step, samples)

    def hyper(self, step: int) -> Hyper:
        """Returns learning rate, momentum and batch of the step after `step` steps."""
        return self.recipe.at(self.progress(step))

    def after_warmup(self) -> Hyper | None:
        """Returns Hyper for the first step after the warm-up; None if the job ends before."""
        epochs = from_config.warmup_epochs(
            self.config, clock(self.config, self.dataset, self.context), self.recipe.batch
        )
        for phase in self.batch_phases:
            steps = steps_until(epochs, phase.samples, phase.batch, self.dataset)
            if steps < phase.steps:
                return self.hyper(phase.first_step + int(steps))
        return None

    def samples_per_rank(self, batch: int) -> tuple[int, int]:
        """Returns the fewest and the most samples of a rank in a step."""
        return batch // self._readers, math.ceil(batch / self._readers)

    @property
    def _readers(self) -> int:
        """Returns the number of ranks that read different samples."""
        return self.config.readers(self.ranks)

    def forward_passes(self, batch: int) -> int:
        """Returns the passes of a rank in a step; data.sampling=partition may need one more in a
        step that crosses epochs."""
        most = largest_share(0, batch, self._readers, self.dataset, self.config.data.sampling)
        return passes_of_step(self.config, most, batch, self.recipe.batch.first)


class Infeasible(NamedTuple):
    """A number of ranks on which the configuration cannot run, and why."""

    ranks: int
    error: UserError


def find_conflict(config: Config, ranks: int) -> Infeasible | None:
    """Returns why the configuration does not support `ranks` ranks with any data; None if it
    does."""
    try:
        refuse_on_every_engine(resolve_batch_size(config, ranks), ranks)
    except UserError as error:
        return Infeasible(ranks, error)
    return None


def forecast(
    config: Config, dataset: int, ranks: int, context: int | None = None
) -> Forecast | Infeasible:
    """Returns the job on `ranks` ranks, or why it is impossible or its steps are unknown.

    dataset: training samples; context: tokens of each, if samples have tokens.
    """
    if conflict := find_conflict(config, ranks):
        return conflict
    config = resolve_batch_size(config, ranks)
    try:
        recipe = build_recipe(config, dataset, context)
    except UserError as error:
        return Infeasible(ranks, error)
    if recipe.epochs == math.inf:
        what = f"only stop.time={config.stop.time} ends the job, so its number of steps is unknown"
        return Infeasible(
            ranks,
            UserError(
                what, config.where("stop.time"), "plan with stop.steps=N or epochs=N as well"
            ),
        )
    phases = phases_of_job(
        recipe, dataset, total_samples(config, dataset), config.stop.steps or math.inf
    )
    return Forecast(ranks, config, recipe, dataset, context, phases)


def group_by_recipe(forecasts: Sequence[Forecast]) -> list[list[Forecast]]:
    """Groups forecasts with equal recipes: their steps have the same learning rates and batches."""
    groups: list[list[Forecast]] = []
    for one in forecasts:
        group = next((group for group in groups if group[0].recipe == one.recipe), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def phases_of_job(
    recipe: Recipe, dataset: int, total: int, step_limit: float
) -> tuple[BatchPhase, ...]:
    """Yields the phases up to the first step that has read `total` samples, or to `step_limit`
    steps."""
    phases: list[BatchPhase] = []
    for phase in batch_phases(recipe.batch, dataset):
        to_the_end = -((phase.samples - total) // phase.batch)  # rounded up, in integers
        steps = min(to_the_end, step_limit - phase.first_step, phase.steps)
        phases.append(phase._replace(steps=int(steps)))
        if steps < phase.steps or to_the_end <= steps or phase.first_step + steps >= step_limit:
            break
    return tuple(phases)


class Memory(NamedTuple):
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer_state: int | None  # None if it is known only after the optimizer's first step
    buckets: int  # buckets of gradients being reduced, with comm.reduce=bucket


def memory(shapes: Shapes, rule: Rule | None, precision: str) -> Memory:
    """Computes the memory from shapes, without allocating it. `rule` is None for a class of
    torch.optim."""
    # weights of half precision are float32
    dtype = np.dtype("float64" if precision == "fp64" else "float32")
    # one number each, whatever the shape
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes.values()]
    weights = sum(array.nbytes for array in arrays)
    ops = ArrayOps(SimpleNamespace(zeros_like=lambda array: array, zeros=np.zeros))
    optimizer_state = None
    if rule is not None:
        rules = [rule.of_parameter(name, shape, False) for name, shape in shapes.items()]
        optimizer_state = sum(
            state.nbytes
            for one, array in zip(rules, arrays, strict=True)
            for state in one.init(array, ops)
        )
    return Memory(weights, weights, optimizer_state, weights)

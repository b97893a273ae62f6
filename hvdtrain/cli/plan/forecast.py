"""What a job would do: its steps on any number of ranks and the memory of one rank, computed without a step."""

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
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.training.build import build_recipe
from hvdtrain.training.conflicts import refuse_on_every_engine
from hvdtrain.training.input.micro_batches import micro_batches_per_step

Shapes = Mapping[str, tuple[int, ...]]  # of the trained parameters, by name


class BatchPhase(NamedTuple):
    """Consecutive steps with the same global batch."""

    batch: int
    first_step: int  # steps done before the first of them
    samples: int  # read before the first of them
    steps: int


@dataclass(frozen=True)
class Forecast:
    """A whole job on `ranks` ranks."""

    ranks: int
    config: Config
    recipe: Recipe
    dataset: int  # training samples
    batch_phases: tuple[BatchPhase, ...]

    @property
    def steps(self) -> int:
        last = self.batch_phases[-1]
        return last.first_step + last.steps

    @property
    def epochs(self) -> float:
        """Of the whole job; a fraction where max_steps ends it."""
        return min(float(self.recipe.epochs), self.progress(self.steps).epochs)

    def progress(self, step: int) -> Progress:
        """The progress of the job after `step` steps."""
        phase = next(phase for phase in reversed(self.batch_phases) if phase.first_step <= step)
        samples = phase.samples + (step - phase.first_step) * phase.batch
        return Progress(self.dataset, self.dataset * self.recipe.epochs, step, samples)

    def hyper(self, step: int) -> Hyper:
        """Learning rate, momentum and batch of the step after `step` steps."""
        return self.recipe.at(self.progress(step))

    def after_warmup(self) -> Hyper | None:
        """The same of the first step after the warm-up; None if the job ends before."""
        epochs = from_config.warmup_epochs(self.config, self.dataset)
        for phase in self.batch_phases:
            steps = steps_until(epochs, phase.samples, phase.batch, self.dataset)
            if steps < phase.steps:
                return self.hyper(phase.first_step + int(steps))
        return None

    def samples_per_rank(self, batch: int) -> tuple[int, int]:
        """The fewest and the most samples of a rank in a step."""
        return batch // self.ranks, math.ceil(batch / self.ranks)

    def forward_passes(self, batch: int) -> int:
        """Of a rank in a step; data.sampling=partition may take one more in a step that reaches into the next epoch."""
        most = largest_share(0, batch, self.ranks, self.dataset, self.config.data.sampling)
        return micro_batches_per_step(self.config.batch, most, batch, self.recipe.batch.first)


class Infeasible(NamedTuple):
    """A number of ranks on which the configuration cannot run, and why."""

    ranks: int
    error: UserError


def find_conflict(config: Config, ranks: int) -> Infeasible | None:
    """Why the configuration does not fit `ranks` ranks, whatever the data; None where it does."""
    try:
        refuse_on_every_engine(resolve_batch_size(config, ranks), ranks)
    except UserError as error:
        return Infeasible(ranks, error)
    return None


def forecast(config: Config, dataset: int, ranks: int) -> Forecast | Infeasible:
    """The job on `ranks` ranks, or why the configuration or the recipe does not fit them; `dataset`: training samples."""
    if conflict := find_conflict(config, ranks):
        return conflict
    config = resolve_batch_size(config, ranks)
    try:
        recipe = build_recipe(config, dataset)
    except UserError as error:
        return Infeasible(ranks, error)
    return Forecast(ranks, config, recipe, dataset, batch_phases(recipe, dataset, config.max_steps))


def group_by_recipe(forecasts: Sequence[Forecast]) -> list[list[Forecast]]:
    """Forecasts of equal recipes together: their steps have the same learning rates and batches, on any number of ranks."""
    groups: list[list[Forecast]] = []
    for one in forecasts:
        group = next((group for group in groups if group[0].recipe == one.recipe), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def batch_phases(recipe: Recipe, dataset: int, max_steps: int | None) -> tuple[BatchPhase, ...]:
    """The whole job, without a loop over its steps: the batch changes at a few epochs only."""
    phases: list[BatchPhase] = []
    total = dataset * recipe.epochs
    step_limit = max_steps or math.inf
    step = samples = 0
    while samples < total and step < step_limit:
        batch = recipe.batch(samples / dataset)
        to_the_end = -((samples - total) // batch)  # rounded up, in integers
        to_each_change = [steps_until(epoch, samples, batch, dataset) for epoch in recipe.batch.at if epoch > samples / dataset]
        steps = int(min(to_the_end, step_limit - step, *to_each_change))
        phases.append(BatchPhase(batch, step, samples, steps))
        step += steps
        samples += steps * batch
    return tuple(phases)


def steps_until(epoch: float, samples: int, batch: int, dataset: int) -> float:
    """How many steps come before the first that starts at `epoch` or later; infinity where that is longer than any job.

    Rounded as Progress.epochs rounds: the estimate is corrected by the same division.
    """
    estimate = (epoch * dataset - samples) / batch
    if not estimate < 2**52:
        return math.inf
    steps = max(0, math.ceil(estimate))
    while steps and (samples + (steps - 1) * batch) / dataset >= epoch:
        steps -= 1
    while (samples + steps * batch) / dataset < epoch:
        steps += 1
    return steps


class Memory(NamedTuple):
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer_state: int | None  # None where it is known only after the optimizer's first step
    buckets: int  # of gradients that are being reduced, with comm.reduce=bucket


def memory(shapes: Shapes, rule: Rule | None, precision: str) -> Memory:
    """Computed from shapes: nothing of that size is allocated. `rule` is None for a class of torch.optim."""
    dtype = np.dtype("float64" if precision == "fp64" else "float32")  # weights of half precision are float32
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes.values()]  # one number each, whatever the shape
    weights = sum(array.nbytes for array in arrays)
    ops = ArrayOps(SimpleNamespace(zeros_like=lambda array: array, zeros=np.zeros))
    optimizer_state = None if rule is None else sum(state.nbytes for array in arrays for state in rule.init(array, ops))
    return Memory(weights, weights, optimizer_state, weights)

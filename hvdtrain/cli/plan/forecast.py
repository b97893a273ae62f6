"""What a job would do, in numbers: its steps on any number of ranks and the memory of one rank, without a step being done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.sampler import largest_share
from hvdtrain.errors import UserError
from hvdtrain.optim.rule import Plain, Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.train.build import build_recipe, check_batch
from hvdtrain.train.input.micro_batches import micro_batches_per_step

Shapes = Mapping[str, tuple[int, ...]]  # of the trained parameters, by name


class Stretch(NamedTuple):
    """Steps of the same batch, one after the other."""

    batch: int
    step: int  # done before the first of them
    samples: int  # read before the first of them
    steps: int


@dataclass(frozen=True)
class Forecast:
    """The whole job on `ranks` ranks."""

    ranks: int
    config: Config
    recipe: Recipe
    dataset: int  # training samples
    stretches: tuple[Stretch, ...]

    @property
    def steps(self) -> int:
        return self.stretches[-1].step + self.stretches[-1].steps

    @property
    def epochs(self) -> float:
        """Of the whole job; a fraction where max_steps ends it."""
        return min(float(self.recipe.epochs), self.progress(self.steps).epochs)

    def progress(self, step: int) -> Progress:
        """Where the job stands after `step` steps."""
        stretch = next(s for s in reversed(self.stretches) if s.step <= step)
        return Progress(self.dataset, self.dataset * self.recipe.epochs, step, stretch.samples + (step - stretch.step) * stretch.batch)

    def hyper(self, step: int) -> Hyper:
        """The numbers of the step that follows `step` others."""
        return self.recipe.at(self.progress(step))

    def warm(self) -> Hyper | None:
        """The numbers of the first step after the warm-up; None if the job ends before."""
        epochs = from_config.warmup_epochs(self.config, self.dataset)
        for s in self.stretches:
            wait = steps_until(epochs, s.samples, s.batch, self.dataset)
            if wait < s.steps:
                return self.hyper(s.step + int(wait))
        return None

    def share(self, batch: int) -> tuple[int, int]:
        """Samples of one rank, the fewest and the most."""
        return batch // self.ranks, -(-batch // self.ranks)

    def passes(self, batch: int) -> int:
        """Forward passes of one rank in a step; sampling=partition may take one more where two epochs meet."""
        most = largest_share(0, batch, self.ranks, self.dataset, self.config.data.sampling)
        return micro_batches_per_step(self.config.batch, most, batch, self.recipe.batch.first)


class Impossible(NamedTuple):
    """A number of ranks that the configuration does not fit, and why."""

    ranks: int
    error: UserError


def forecast(config: Config, provenance: Provenance, dataset: int, ranks: int) -> Forecast | Impossible:
    """The job on that many ranks, with the checks that every rank makes before it starts."""
    try:
        config, provenance = resolve_batch_size(config, provenance, ranks)
        check_batch(config, provenance, ranks)
        recipe = build_recipe(config, provenance, dataset)
    except UserError as error:
        return Impossible(ranks, error)
    return Forecast(ranks, config, recipe, dataset, stretches(recipe, dataset, config.max_steps))


def alike(rows: Sequence[Forecast]) -> list[list[Forecast]]:
    """Those whose steps have the same numbers, together: how many ranks share the work changes nothing then."""
    groups: list[list[Forecast]] = []
    for row in rows:
        same = next((group for group in groups if group[0].recipe == row.recipe), None)
        if same is None:
            groups.append([row])
        else:
            same.append(row)
    return groups


def stretches(recipe: Recipe, dataset: int, max_steps: int | None) -> tuple[Stretch, ...]:
    """The whole job, without a loop over its steps: the batch changes at a few epochs only."""
    found: list[Stretch] = []
    total, step, samples = dataset * recipe.epochs, 0, 0
    while samples < total and step < (max_steps or math.inf):
        batch = recipe.batch(samples / dataset)
        changes = [steps_until(epoch, samples, batch, dataset) for epoch in recipe.batch.at if epoch > samples / dataset]
        steps = int(min(-((samples - total) // batch), (max_steps or math.inf) - step, *changes))
        found.append(Stretch(batch, step, samples, steps))
        step, samples = step + steps, samples + steps * batch
    return tuple(found)


def steps_until(epoch: float, samples: int, batch: int, dataset: int) -> float:
    """How many steps come before the first that starts at `epoch` or later: a whole number, by the very arithmetic of Progress.epochs."""
    estimate = (epoch * dataset - samples) / batch
    if not estimate < 2**52:
        return math.inf  # longer than any job
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
    optimizer_state: int | None  # of the optimizer; None where nobody knows before its first step
    buckets: int  # of gradients on their way to the other ranks, where our own buckets carry them


def memory(shapes: Shapes, rule: Rule | None, precision: str) -> Memory:
    """From shapes alone: nothing of that size is allocated."""
    dtype = np.dtype("float64" if precision == "fp64" else "float32")  # weights of half precision are float32
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes.values()]  # one number each, whatever the shape
    weights = sum(array.nbytes for array in arrays)
    ops = Plain(SimpleNamespace(zeros_like=lambda array: array, zeros=np.zeros))
    optimizer_state = None if rule is None else sum(slot.nbytes for array in arrays for slot in rule.init(array, ops))
    return Memory(weights, weights, optimizer_state, weights)

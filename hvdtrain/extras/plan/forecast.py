"""What a job would do, computed without a step: its steps on any number of ranks, the memory of a
rank, and with --memory what fits."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.cli.output import align
from hvdtrain.comm.engines import Feature, features_of, possible_engines
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.sampler import largest_share
from hvdtrain.errors import UserError
from hvdtrain.frameworks.footprint import KINDS, Footprint
from hvdtrain.optim.rule import ArrayOps, Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.batch import BatchPhase, batch_phases, resolve_batch_size, steps_until
from hvdtrain.recipe.clock import clock, total_samples
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import build_recipe
from hvdtrain.training.conflicts import refuse_on_every_engine
from hvdtrain.training.input import passes_of_step
from hvdtrain.training.memory import (
    MARGIN,
    MemoryForecast,
    forecast_memory,
    gib,
    stages_of,
)

Shapes = Mapping[str, tuple[int, ...]]  # of the trained parameters, by name


@dataclass(frozen=True)
class Forecast:
    """A whole job on `ranks` ranks."""

    ranks: int
    config: Config
    recipe: Recipe
    dataset: int  # training samples
    context: int | None  # tokens of each, where they have tokens
    batch_phases: tuple[BatchPhase, ...]

    @property
    def steps(self) -> int:
        last = self.batch_phases[-1]
        return last.first_step + int(last.steps)

    @property
    def epochs(self) -> float:
        """Epochs of the whole job."""
        return min(self.recipe.epochs, self.progress(self.steps).epochs)

    def progress(self, step: int) -> Progress:
        """The progress of the job after `step` steps."""
        phase = next(phase for phase in reversed(self.batch_phases) if phase.first_step <= step)
        samples = phase.samples + (step - phase.first_step) * phase.batch
        return Progress(self.dataset, total_samples(self.config, self.dataset), step, samples)

    def hyper(self, step: int) -> Hyper:
        """Learning rate, momentum and batch of the step after `step` steps."""
        return self.recipe.at(self.progress(step))

    def after_warmup(self) -> Hyper | None:
        """Hyper of the first step after the warm-up; None if the job ends before."""
        epochs = from_config.warmup_epochs(
            self.config, clock(self.config, self.dataset, self.context), self.recipe.batch
        )
        for phase in self.batch_phases:
            steps = steps_until(epochs, phase.samples, phase.batch, self.dataset)
            if steps < phase.steps:
                return self.hyper(phase.first_step + int(steps))
        return None

    def samples_per_rank(self, batch: int) -> tuple[int, int]:
        """The fewest and the most samples of a rank in a step."""
        return batch // self._readers, math.ceil(batch / self._readers)

    @property
    def _readers(self) -> int:
        """Ranks that read different samples."""
        return self.config.readers(self.ranks)

    def forward_passes(self, batch: int) -> int:
        """Passes of a rank in a step; data.sampling=partition may take one more in a step that
        reaches into the next epoch."""
        most = largest_share(0, batch, self._readers, self.dataset, self.config.data.sampling)
        return passes_of_step(self.config, most, batch, self.recipe.batch.first)


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


def forecast(
    config: Config, dataset: int, ranks: int, context: int | None = None
) -> Forecast | Infeasible:
    """The job on `ranks` ranks, or why the configuration or the recipe does not fit them, or its
    steps are not known.

    dataset: training samples; context: tokens of each, where they have tokens.
    """
    if conflict := find_conflict(config, ranks):
        return conflict
    config = resolve_batch_size(config, ranks)
    try:
        recipe = build_recipe(config, dataset, context)
    except UserError as error:
        return Infeasible(ranks, error)
    if recipe.epochs == math.inf:
        what = f"stop.time={config.stop.time} alone ends the job: its steps are not known"
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
    """Forecasts of equal recipes together: their steps have the same learning rates and batches, on
    any number of ranks."""
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
    """Up to the first step that has read `total` samples, or to `step_limit` steps."""
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
    optimizer_state: int | None  # None where it is known only after the optimizer's first step
    buckets: int  # of gradients that are being reduced, with comm.reduce=bucket


def memory(shapes: Shapes, rule: Rule | None, precision: str) -> Memory:
    """Computed from shapes: nothing of that size is allocated. `rule` is None for a class of
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


RANKS = (1, 2, 4, 8)  # without --ranks
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_HEADER = (
    "ranks",
    "stage",
    "recompute",
    "micro",
    "weights",
    "gradients",
    "state",
    "activations",
    "on its way",
    "other",
    "peak",
    "largest",
)


class Row(NamedTuple):
    """A rank of so many, with these values of shard.stage and model.recompute."""

    ranks: int
    stage: int
    recompute: str
    micro: int  # samples in a pass
    footprint: Footprint
    bytes_per_sample: float  # that a sample more in a pass takes
    share: int  # the most samples that a pass can have

    @property
    def needs(self) -> float:
        """Bytes of the memory that a rank has beside libraries and data."""
        return MARGIN * self.footprint.total

    def largest_micro(self, room: float) -> int:
        """Samples of the largest pass that fits; 0: none does."""
        evaluation = MARGIN * (
            self.footprint.evaluation + self.footprint.total - self.footprint.tensors
        )
        beside = self.footprint.total - self.footprint.tensors + self.footprint.step
        if evaluation > room:
            return 0
        if self.bytes_per_sample <= 0:  # a step takes most elsewhere, in the update
            return self.share if MARGIN * beside <= room else 0
        return max(
            0, min(self.share, self.micro + int((room / MARGIN - beside) // self.bytes_per_sample))
        )


@dataclass(frozen=True)
class MemoryPlan:
    """What --memory shows."""

    rows: list[Row]
    libraries: int  # bytes of the interpreter, the libraries and the data that are in memory
    limit: int | None  # bytes of a rank; None: not given
    config: Config

    @property
    def room(self) -> float:
        return float("inf") if self.limit is None else max(0, self.limit - self.libraries)


def read_size(value: str) -> int:
    """16GiB, 16G, 500MB -> bytes. Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", value.strip().lower())
    if not found or not float(found[1]):
        raise UserError(
            f"cannot read the size {value!r}",
            "--memory",
            "give it as in --memory 16GiB or --memory 500MB",
        )
    return int(float(found[1]) * _UNITS[found[2]])


def with_memory_value(arguments: Sequence[str]) -> list[str]:
    """The arguments, with an empty value for a --memory that has none."""
    completed = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        has_none = argument == "--memory" and (following.startswith("-") or "=" in following)
        completed.append("--memory=" if has_none else argument)
    return completed


def memory_plan(
    config: Config, task: Task, forecasts: Sequence[Forecast], limit: int | None, libraries: int
) -> MemoryPlan:
    """Predicts with one rank and with two, and computes what more ranks take of their parts; of
    meshes with each number of ranks.

    Raises UserError where it cannot.
    """
    rows: list[Row] = []
    several = [one for one in forecasts if one.ranks > 1]
    for recompute in ("none", "all") if config.parallel.may_recompute else ("none",):
        try:
            rows += [
                row
                for one in forecasts
                if one.ranks == 1
                for row in _rows(one, task, [0], recompute, [one])
            ]
            # parts of layers: no rule
            groups = (
                [[one] for one in several]
                if config.parallel.ranks > 1
                else [several]
                if several
                else []
            )
            rows += [
                row
                for group in groups
                for row in _rows(group[0], task, stages_of(config), recompute, group)
            ]
        except UserError:
            if recompute == "none":
                raise
    rows.sort(key=lambda row: row.ranks)
    return MemoryPlan(rows, libraries, limit, config)


def _rows(
    first: Forecast,
    task: Task,
    stages: Sequence[int],
    recompute: str,
    forecasts: Sequence[Forecast],
) -> list[Row]:
    """Rows of all these forecasts, from predictions for the first of them."""
    reference = _memory_forecast(first, task)
    micro = reference.step().micro
    other = micro // 2 or 2
    rows = []
    per_sample = 0.0
    weights = 0
    for stage in stages:
        found = reference.footprint(stage=stage, recompute=recompute, micro=micro)
        if stage == stages[0]:
            weights = found.weights
            less = reference.footprint(stage=stage, recompute=recompute, micro=other)
            per_sample = (found.step - less.step) / (micro - other)
        for one in forecasts:
            step = _memory_forecast(one, task).step()
            scaled = on_ranks(found, stage, first.ranks, one.ranks, weights)
            more = int(per_sample * (step.micro - micro))
            scaled = scaled._replace(activations=max(0, scaled.activations + more))
            rows.append(
                Row(one.ranks, stage, recompute, step.micro, scaled, per_sample, step.samples)
            )
    return rows


def on_ranks(found: Footprint, stage: int, ranks: int, wanted: int, weights: int) -> Footprint:
    """The parts of a stage on another number of ranks; weights: the bytes of all of them."""
    if not stage or ranks == wanted:
        return found
    less = 1 - ranks / wanted
    state = int(found.optimizer_state * less)
    part = int(weights / ranks * less)
    if stage == 3:  # gradients are there in a step alone, and not those of all blocks at the peak
        return found._replace(
            weights=found.weights - part,
            optimizer_state=found.optimizer_state - state,
            gradients=found.gradients - int(found.gradients * less),
            evaluation=found.evaluation - state - part,
            checkpoint=found.checkpoint - state - part,
            largest_array=found.largest_array * ranks // wanted,
        )
    return found._replace(
        optimizer_state=found.optimizer_state - state,
        gradients=found.gradients - part,
        evaluation=found.evaluation - state - part,
        checkpoint=found.checkpoint - state,
        copies=max(0, found.copies - 4 * state),
    )


def _memory_forecast(one: Forecast, task: Task) -> MemoryForecast:
    engines = possible_engines(one.config.comm.engine, one.ranks)
    sends = (
        [engine for engine in engines if "p2p" in features_of(engine)]
        if one.config.parallel.pipeline > 1
        else []
    )
    features: frozenset[Feature] = features_of((sends or engines)[0])
    return forecast_memory(
        one.config, task, one.recipe, one.ranks, features, one.dataset, one.config.batch.evaluate, 0
    )


def memory_lines(plan: MemoryPlan) -> list[str]:
    """A row for each, and one sentence which to take."""
    precision = plan.config.speed.precision
    limit = plan.limit
    lines = [
        f"memory of one rank at its peak, MiB ({precision}, {plan.config.optim.name}), beside "
        f"{gib(plan.libraries)} of libraries and data"
    ]
    cells = [_cells(row, plan) for row in plan.rows]
    header = [*_HEADER[:-1], _HEADER[-1] if limit else ""]
    lines += align([header, *cells], left=(), gap=" ")
    lines += [
        "  state: of the optimizer; on its way: between ranks; other: buffers, workspace, "
        "samples, copies (checkpoint, guard.lost)",
        f"  peak: of tensors and copies; a rank needs {MARGIN:g} times that, and its libraries "
        "and data" + ("; largest: samples in a pass that fit" if limit else ""),
    ]
    if plan.rows and plan.config.speed.device != "cpu":
        copies = max(row.footprint.checkpoint + row.footprint.copies for row in plan.rows)
        staging = max(row.footprint.staging for row in plan.rows)
        lines += [
            f"  on a GPU: the copies, at most {gib(copies)}, are on its host and not in its "
            "memory; there is a page-locked buffer, too,",
            f"  of {gib(staging)}: arrays come to the host through it one by one, and it is as "
            "large as the largest",
        ]
    if any(row.footprint.evaluation > row.footprint.step for row in plan.rows):
        lines.append("  *: the evaluation takes most: a smaller batch.evaluate takes less")
    return [*lines, *(["", f"  {sentence(plan)}"] if plan.rows else [])]


def _cells(row: Row, plan: MemoryPlan) -> list[str]:
    found = row.footprint
    other = found.buffers + found.workspace + found.inputs + found.checkpoint + found.copies
    evaluates = found.evaluation > found.step
    sizes = [
        found.weights,
        found.gradients,
        found.optimizer_state,
        found.activations,
        found.communication,
        other,
        found.total,
    ]
    cells = [
        str(row.ranks),
        str(row.stage),
        row.recompute,
        str(row.micro),
        *(f"{size / 2**20:,.1f}" for size in sizes),
    ]
    cells[-1] += "*" * evaluates
    if plan.limit is None:
        return [*cells, ""]
    return [*cells, f"{row.largest_micro(plan.room):,}" if row.largest_micro(plan.room) else "none"]


def sentence(plan: MemoryPlan) -> str:
    """Which to take, for the most ranks that are shown: the first that fits of those that cost
    least time."""
    ranks = max(row.ranks for row in plan.rows)
    rows = sorted(
        (row for row in plan.rows if row.ranks == ranks),
        key=lambda row: (row.recompute != "none", row.stage),
    )
    plain = rows[0]
    of_ranks = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if plan.limit is None:
        least = min(rows, key=lambda row: row.footprint.total)
        return (
            f"on {of_ranks} {_words(least)} takes least, {gib(least.needs)}; {_words(plain)} "
            f"takes {gib(plain.needs)}"
        )
    for row in rows:
        if row.needs <= plan.room:
            rest = (
                ""
                if row is plain
                else f"; {_words(plain)} needs {gib(plain.needs + plan.libraries)}"
            )
            return (
                f"{_words(row)} fits in {gib(plan.limit)} on {of_ranks}, with "
                f"{gib(row.needs + plan.libraries)}{rest}"
            )
    smaller = [(row, row.largest_micro(plan.room)) for row in rows]
    for row, micro in smaller:
        if micro:
            return (
                f"{_words(row)} batch.micro={micro} fits in {gib(plan.limit)} on {of_ranks}; as "
                "configured none does"
            )
    least = min(rows, key=lambda row: row.footprint.total)
    return (
        f"nothing fits in {gib(plan.limit)} on {of_ranks}: {_words(least)} needs "
        f"{gib(least.needs + plan.libraries)}"
    )


def _words(row: Row) -> str:
    return f"shard.stage={row.stage}" + (" model.recompute=all" if row.recompute == "all" else "")


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan's rows for programs, in bytes."""
    return {
        "libraries": plan.libraries,
        "limit": plan.limit,
        "margin": MARGIN,
        "kinds": list(KINDS),
        "rows": [
            {
                "ranks": row.ranks,
                "stage": row.stage,
                "recompute": row.recompute,
                "micro": row.micro,
                "bytes": row.footprint.named(),
                "bytes_per_sample": row.bytes_per_sample,
                "fits": None if plan.limit is None else row.needs <= plan.room,
                "largest_micro": None if plan.limit is None else row.largest_micro(plan.room),
            }
            for row in plan.rows
        ],
        "advice": sentence(plan) if plan.rows else None,
    }

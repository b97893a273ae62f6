"""plan --memory: the memory of a rank by number of ranks, shard.stage and recomputation, and the
settings that fit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.cli.output import align
from hvdtrain.comm.engines import Feature, features_of, possible_engines
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.plan.forecast.job import Forecast
from hvdtrain.frameworks.footprint import KINDS, Footprint
from hvdtrain.tasks.task import Task
from hvdtrain.training.memory import (
    MARGIN,
    MemoryForecast,
    forecast_memory,
    gib,
    stages_of,
)

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


class MemoryEstimate(NamedTuple):
    """The predicted memory of a rank for a number of ranks, shard.stage and model.recompute."""

    ranks: int
    stage: int
    recompute: str
    micro: int  # samples in a pass
    footprint: Footprint
    bytes_per_sample: float  # bytes of one more sample in a pass
    share: int  # the most samples that a pass can have

    @property
    def needs(self) -> float:
        """The bytes that a rank needs in addition to libraries and data."""
        return MARGIN * self.footprint.total

    def largest_micro(self, room: float) -> int:
        """Returns the largest micro-batch that fits; 0 if none does."""
        evaluation = MARGIN * (
            self.footprint.evaluation + self.footprint.total - self.footprint.tensors
        )
        beside = self.footprint.total - self.footprint.tensors + self.footprint.step
        start = MARGIN * (self.footprint.start + self.footprint.total - self.footprint.tensors)
        if max(evaluation, start) > room:
            return 0
        if self.bytes_per_sample <= 0:  # a step takes most elsewhere, in the update
            return self.share if MARGIN * beside <= room else 0
        return max(
            0, min(self.share, self.micro + int((room / MARGIN - beside) // self.bytes_per_sample))
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The plan that --memory prints."""

    rows: list[MemoryEstimate]
    libraries: int  # bytes of the interpreter, the libraries and the data that are in memory
    limit: int | None  # bytes of a rank; None: not given
    config: Config

    @property
    def room(self) -> float:
        return float("inf") if self.limit is None else max(0, self.limit - self.libraries)


def read_size(value: str) -> int:
    """Parses 16GiB, 16G or 500MB to bytes. Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", value.strip().lower())
    if not found or not float(found[1]):
        raise UserError(
            f"cannot read the size {value!r}",
            "--memory",
            "give it as in --memory 16GiB or --memory 500MB",
        )
    return int(float(found[1]) * _UNITS[found[2]])


def with_memory_value(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments, with an empty value for a --memory without one."""
    completed = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        has_none = argument == "--memory" and (following.startswith("-") or "=" in following)
        completed.append("--memory=" if has_none else argument)
    return completed


def memory_plan(
    config: Config, task: Task, forecasts: Sequence[Forecast], limit: int | None, libraries: int
) -> MemoryPlan:
    """Predicts the memory with one and two ranks, and computes other numbers of ranks from these;
    meshes are predicted for each number.

    Raises UserError if it cannot.
    """
    rows: list[MemoryEstimate] = []
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
) -> list[MemoryEstimate]:
    """Returns the rows of these forecasts, computed from predictions for the first one."""
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
                MemoryEstimate(
                    one.ranks, stage, recompute, step.micro, scaled, per_sample, step.samples
                )
            )
    return rows


def on_ranks(found: Footprint, stage: int, ranks: int, wanted: int, weights: int) -> Footprint:
    """Computes the memory of a stage on another number of ranks; weights: the bytes of all
    weights."""
    if not stage or ranks == wanted:
        return found
    less = 1 - ranks / wanted
    state = int(found.optimizer_state * less)
    part = int(weights / ranks * less)
    if stage == 3:  # gradients only exist within a step, and at the peak not for all blocks
        return found._replace(
            weights=found.weights - part,
            optimizer_state=found.optimizer_state - state,
            gradients=found.gradients - int(found.gradients * less),
            evaluation=found.evaluation - state - part,
            start=found.start - part,
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
    needed = one.config.parallel.needed_of_engine
    able = [engine for engine in engines if needed <= features_of(engine)]
    features: frozenset[Feature] = features_of((able or engines)[0])
    return forecast_memory(
        one.config, task, one.recipe, one.ranks, features, one.dataset, one.config.batch.evaluate, 0
    )


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Formats a row for each estimate, and a recommendation."""
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
    if any(_starts_with_most(row.footprint) for row in plan.rows):
        lines.append("  +: the start takes most: weights before each rank has its parts of them")
    return [*lines, *(["", f"  {sentence(plan)}"] if plan.rows else [])]


def _cells(row: MemoryEstimate, plan: MemoryPlan) -> list[str]:
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
    cells[-1] += "+" if _starts_with_most(found) else "*" * evaluates
    if plan.limit is None:
        return [*cells, ""]
    return [*cells, f"{row.largest_micro(plan.room):,}" if row.largest_micro(plan.room) else "none"]


def _starts_with_most(found: Footprint) -> bool:
    return found.start > max(found.step, found.evaluation)


def sentence(plan: MemoryPlan) -> str:
    """Returns the recommendation for the largest number of ranks: the fastest settings that fit."""
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


def _words(row: MemoryEstimate) -> str:
    return f"shard.stage={row.stage}" + (" model.recompute=all" if row.recompute == "all" else "")


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """Returns the plan's rows as JSON, in bytes."""
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

"""plan --pipeline: the division of a model into stages, and how long ranks wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from hvdtrain.cli.output import align
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.extras.pipeline.schedule import (
    Schedule,
    UnitCost,
    formula,
    of_stages,
    timeline,
)
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.tasks.task import Task
from hvdtrain.training.conflicts import refuse_on_every_engine
from hvdtrain.training.input import passes_of_step

_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_BAR = 30  # characters of the slowest stage's


class PipelineSplit(NamedTuple):
    """The units at which the model is cut, and the criterion."""

    by: str  # as in parallel.balance
    first: list[int]  # the first unit of each stage


class Bubble(NamedTuple):
    """The share of a step in which a rank waits, 0 to 1."""

    micro: int  # micro-batches of the step
    schedule: Schedule
    by: str
    formula: float  # for equal stages
    measured_times: float


class PipelinePlan(NamedTuple):
    """The plan of one pipeline, shown by --pipeline."""

    config: Config  # configuration of one pipeline
    samples: int  # samples in a micro-batch
    micro: int  # micro-batches of a step
    units: list[UnitCost]
    cuts: list[PipelineSplit]  # splits for this schedule; the job's is first
    bubbles: list[Bubble]


def plan_pipeline(
    config: Config, ranks: Sequence[int] | None, task: Callable[[], Task]
) -> tuple[list[str], dict[str, Any]]:
    """Returns the plans of parallel.pipeline ranks or, if that key is not set, of `ranks`: lines,
    and values for programs. task: reads the data. Raises UserError."""
    size = PipelineKeys.of(config).pipeline
    sizes = [size] if size > 1 else ranks or [2]
    if 1 in sizes:
        raise UserError(
            "a pipeline has 2 ranks or more",
            "--ranks",
            "plan --pipeline --ranks 2,4, or parallel.pipeline=2",
        )
    of_job = task()
    plans = [pipeline_plan(config, of_job, size) for size in sizes]
    lines = [line for each in plans for line in ["", *pipeline_lines(each)]]
    return lines[1:], {"pipelines": [pipeline_json(each) for each in plans]}


def pipeline_plan(config: Config, task: Task, ranks: int) -> PipelinePlan:
    """Measures the units of the model in this process. `ranks`: of the pipeline, if
    parallel.pipeline=1. Raises UserError."""
    from hvdtrain.extras.pipeline.costs import unit_costs

    if not config.parallel.has_stages:
        config = config.replace(parallel=config.parallel.replace(pipeline=ranks))
    # no rank has the whole model for sampling
    config = config.replace(log=config.log.replace(samples=0))
    config = resolve_batch_size(config, config.parallel.ranks)
    refuse_on_every_engine(config, config.parallel.ranks)
    batch = config.batch.size
    micro = passes_of_step(config, batch, batch, batch)
    samples = -(-batch // micro)
    units = unit_costs(config, task, samples)
    parallel = PipelineKeys.of(config)
    stages = parallel.pipeline * parallel.stages_of_rank
    cuts = sorted(_cuts(config, units, stages), key=lambda cut: cut.by != _label(config))
    numbers = sorted({micro, *(factor * parallel.pipeline for factor in (1, 2, 4, 8))})
    bubbles = [
        bubble
        for number in numbers
        for schedule in _SCHEDULES
        for bubble in _bubbles(config, units, schedule, number)
    ]
    return PipelinePlan(config, samples, micro, units, cuts, bubbles)


def _label(config: Config) -> str:
    balance = PipelineKeys.of(config).balance
    return ",".join(map(str, balance)) if isinstance(balance, list) else balance


def _cuts(config: Config, units: Sequence[UnitCost], stages: int) -> list[PipelineSplit]:
    """Returns the cuts by operations, by seconds, and by the job's parallel.balance if it has the
    same number of stages."""
    from hvdtrain.extras.pipeline.cuts import (
        balanced_cuts,
        given_cuts,
    )  # torch, which other plans do without

    balance = PipelineKeys.of(config).balance
    splits = [
        PipelineSplit("operations", balanced_cuts([unit.operations for unit in units], stages)),
        PipelineSplit("seconds", balanced_cuts([sum(unit.seconds) for unit in units], stages)),
    ]
    if isinstance(balance, list) and len(balance) == stages:
        splits.append(
            PipelineSplit(
                _label(config),
                given_cuts(
                    balance, [unit.name for unit in units], config.where("parallel.balance")
                ),
            )
        )
    return splits


def _bubbles(
    config: Config, units: Sequence[UnitCost], schedule: Schedule, micro: int
) -> list[Bubble]:
    """Returns the bubbles; no bubble if the model has fewer units than stages."""
    parallel = PipelineKeys.of(config)
    ranks = parallel.pipeline
    virtual = (parallel.virtual or 2) if schedule == "interleaved" else 1
    if ranks * virtual > len(units):
        return []
    equal = formula(schedule, ranks, micro, virtual)
    seconds = [unit.seconds for unit in units]
    return [
        Bubble(
            micro,
            schedule,
            by,
            equal,
            timeline(schedule, ranks, micro, virtual, of_stages(seconds, first)).bubble,
        )
        for by, first in _cuts(config, units, ranks * virtual)
    ]


def pipeline_lines(plan: PipelinePlan) -> list[str]:
    """Returns lines with the units, the stages of each split, and the shares of waiting."""
    parallel = PipelineKeys.of(plan.config)
    lines = [
        f"{plan.config.model.name} on a pipeline of {parallel.pipeline} ranks, "
        f"{parallel.schedule}: "
        f"{plan.micro} micro-batches of {plan.samples} samples",
        "",
        *_units(plan.units),
        "",
    ]
    for cut in plan.cuts:
        lines += [*_stages(plan, cut), ""]
    return [*lines, *_shares(plan), "", f"  {_advice(plan)}"]


def _units(units: Sequence[UnitCost]) -> list[str]:
    operations = sum(unit.operations for unit in units)
    seconds = sum(sum(unit.seconds) for unit in units)
    rows = [
        [
            unit.name,
            *(f"{1e3 * each:.2f}" for each in unit.seconds),
            f"{100 * sum(unit.seconds) / seconds:.1f}",
            f"{100 * unit.operations / operations:.1f}" if operations else "-",
        ]
        for unit in units
    ]
    return [
        *align([["unit", "forward ms", "backward ms", "% of time", "% of operations"], *rows]),
        "  the fastest of 5 passes of a micro-batch in this process, without the loss; "
        "operations: of the forward pass's matrix products",
    ]


def _stages(plan: PipelinePlan, cut: PipelineSplit) -> list[str]:
    """Returns a bar for each stage."""
    seconds = [sum(each) for each in of_stages([unit.seconds for unit in plan.units], cut.first)]
    is_of_job = cut.by == _label(plan.config)
    head = (
        f"cut by {cut.by}"
        if cut.by in ("operations", "seconds")
        else f"cut as parallel.balance={cut.by}"
    )
    rows = [
        [
            f"  {number}",
            _names(plan.units[start:stop]),
            f"{100 * each / sum(seconds):.1f} %",
            "#" * round(_BAR * each / max(seconds)),
        ]
        for number, ((start, stop), each) in enumerate(
            zip(_ranges(cut, len(plan.units)), seconds, strict=True)
        )
    ]
    return [
        f"{head}: {_counts(plan, cut)} units{', as this job' if is_of_job else ''}",
        *align(rows, left=(0, 1, 3)),
    ]


def _ranges(cut: PipelineSplit, units: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*cut.first, units]))


def _counts(plan: PipelinePlan, cut: PipelineSplit) -> str:
    """Formats the units of each stage as in parallel.balance: 3,3."""
    return ",".join(str(stop - start) for start, stop in _ranges(cut, len(plan.units)))


def _names(units: Sequence[UnitCost]) -> str:
    return units[0].name + (f" ... {units[-1].name}" if len(units) > 1 else "")


def _shares(plan: PipelinePlan) -> list[str]:
    """Returns a row for each schedule and cut, a column for each number of micro-batches."""
    numbers = sorted({bubble.micro for bubble in plan.bubbles})
    rows = [
        [
            "schedule",
            "cut by",
            *(f"m={number}{'*' if number == plan.micro else ''}" for number in numbers),
        ]
    ]
    for schedule, by in dict.fromkeys((bubble.schedule, bubble.by) for bubble in plan.bubbles):
        of = {
            bubble.micro: bubble
            for bubble in plan.bubbles
            if (bubble.schedule, bubble.by) == (schedule, by)
        }
        is_of_job = (schedule, by) == (
            PipelineKeys.of(plan.config).schedule,
            _label(plan.config),
        )
        cells = [
            f"{100 * of[number].formula:.1f} > {100 * of[number].measured_times:.1f}"
            for number in numbers
        ]
        rows.append([f"{schedule}{'*' * is_of_job}", by, *cells])
    return [
        "share of a step in which a rank waits, %: of equal stages by the formula > with the "
        "times above; m: micro-batches of a step",
        *align(rows, left=(0, 1)),
        "  *: of this job",
    ]


def _advice(plan: PipelinePlan) -> str:
    """Whether another cut is faster."""
    slowest = {
        cut.by: max(
            sum(each) for each in of_stages([unit.seconds for unit in plan.units], cut.first)
        )
        for cut in plan.cuts
    }
    own = plan.cuts[0]
    best = min(plan.cuts, key=lambda cut: slowest[cut.by])
    ratio = slowest[own.by] / slowest[best.by]
    if ratio < 1.02:
        return (
            f"parallel.balance={own.by}, as this job: no other cut has a slowest stage that is "
            "faster by 2 % or more"
        )
    return (
        f"parallel.balance={own.by}, as this job, has a slowest stage of {ratio:.2f} times the "
        "time of that of "
        f"parallel.balance={_counts(plan, best)}, cut by {best.by}"
    )


def pipeline_json(plan: PipelinePlan) -> dict[str, Any]:
    """Returns the plan for programs, in seconds and shares of 1."""
    parallel = PipelineKeys.of(plan.config)
    return {
        "pipeline": parallel.pipeline,
        "schedule": parallel.schedule,
        "balance": parallel.balance,
        "micro_batches": plan.micro,
        "samples": plan.samples,
        "units": [
            {"name": unit.name, "operations": unit.operations, **unit.seconds._asdict()}
            for unit in plan.units
        ],
        "cuts": [
            {"by": cut.by, "units": [stop - start for start, stop in _ranges(cut, len(plan.units))]}
            for cut in plan.cuts
        ],
        "bubbles": [bubble._asdict() for bubble in plan.bubbles],
        "advice": _advice(plan),
    }

"""plan --parallel: a row for each mesh, and why the best is best; plan --pipeline: where stages are
cut, and how long their ranks wait."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from hvdtrain.cli.output import align, print_result
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config, known_keys
from hvdtrain.errors import UserError
from hvdtrain.extras.plan.forecast import read_size
from hvdtrain.extras.plan.meshes.machine import add_options as add_machine_options
from hvdtrain.extras.plan.meshes.machine import machine_of
from hvdtrain.extras.plan.meshes.meshes import (
    Data,
    MeshPlan,
    Row,
    framework_of,
    plain_work,
    plan_meshes,
    without_mesh,
)
from hvdtrain.extras.plan.planned_data import training_data
from hvdtrain.frameworks.torch.parallel.pipeline.schedule import (
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
from hvdtrain.training.job_memory import resident_bytes
from hvdtrain.training.memory import MARGIN, gib

PARALLEL_RANKS = 4  # without --ranks
_OPTIONS_OF_JOBS = ("png", "parallel_picture", "all")  # without --pipeline and --parallel
# with --parallel
_OPTIONS_OF_MESHES = (
    "gflops",
    "inside",
    "between",
    "ranks_per_node",
    "measured",
)
_QUIET_S = 5.0  # after that, progress is printed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipeline", action="store_true")
    add_machine_options(parser)


def refuse_options(options: argparse.Namespace) -> None:
    """Raises UserError for an option that the kind of plan does not read."""
    kind = next((kind for kind in ("pipeline", "parallel") if getattr(options, kind)), None)
    others = _OPTIONS_OF_JOBS + (
        ("pipeline",) if kind == "parallel" else ("parallel", "memory", *_OPTIONS_OF_MESHES)
    )
    if kind is None:
        others = _OPTIONS_OF_MESHES
    for name in others:
        if getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            if kind is None:
                raise UserError(
                    f"plan without --parallel does not read {option}",
                    option,
                    f"plan --parallel ..., or leave {option} out",
                )
            raise UserError(
                f"plan --{kind} does not read {option}",
                option,
                f"leave one of them out: --{kind} or {option}",
            )


def run(options: argparse.Namespace, config: Config) -> bool:
    """Prints the plan that the options ask for; False where they ask for neither. Raises
    UserError."""
    if options.pipeline:
        _plan_pipelines(options, config)
    elif options.parallel:
        options.ranks = options.ranks or [PARALLEL_RANKS]
        data = training_data(options, config)
        plan_parallel(options, config, Data(data.task, data.samples))
    return bool(options.pipeline or options.parallel)


def _plan_pipelines(options: argparse.Namespace, config: Config) -> None:
    """Prints plans of parallel.pipeline ranks; without that key of --ranks."""
    sizes = [config.parallel.pipeline] if config.parallel.pipeline > 1 else options.ranks or [2]
    if 1 in sizes:
        raise UserError(
            "a pipeline has 2 ranks or more",
            "--ranks",
            "plan --pipeline --ranks 2,4, or parallel.pipeline=2",
        )
    task = training_data(options, config).task
    plans = [pipeline_plan(config, task, size) for size in sizes]
    lines = [line for each in plans for line in ["", *pipeline_lines(each)]]
    print_result(options.json, lines[1:], {"pipelines": [pipeline_json(each) for each in plans]})


def plan_parallel(options: argparse.Namespace, config: Config, data: Data) -> None:
    """Raises UserError."""
    if len(options.ranks) > 1:
        raise UserError(
            "plan --parallel ranks the meshes of one number of ranks",
            "--ranks",
            "one number, as in --ranks 8",
        )
    (ranks,) = options.ranks
    limit = read_size(options.memory) if options.memory else None
    framework = framework_of(config)
    plain = without_mesh(config, ranks)
    shapes = framework.shapes(plain, data.task)
    weight_bytes = sum(math.prod(shape) for shape in shapes.values()) * (
        8 if config.speed.precision == "fp64" else 4
    )
    machine = machine_of(options, ranks, weight_bytes, plain_work(config, data, ranks))
    room = math.inf if limit is None else max(0, limit - resident_bytes())
    start = time.monotonic()

    def says(name: str) -> None:
        if time.monotonic() - start > _QUIET_S:
            print(f"plan --parallel: {name}", file=sys.stderr, flush=True)

    # this copy may lack the extra that cuts it
    cuts_dense = "parallel.dense" in known_keys() and framework.has_dense_part(plain, data.task)
    plan = plan_meshes(config, data, ranks, machine, room, cuts_dense, says)
    print_result(options.json, mesh_lines(plan), mesh_json(plan))


_HEADER = ("mesh", "ms/step", "compute", "comm", "bubble", "MB sent", "memory")
_WIDTH = 120
_CLOSE = 1.05  # times the seconds of the best: a prediction does not tell these apart


def mesh_lines(plan: MeshPlan) -> list[str]:
    nodes = math.ceil(plan.ranks / plan.machine.per_node)
    lines = [
        f"hvdtrain plan --parallel: meshes of {plan.ranks} rank{'s' if plan.ranks > 1 else ''} on "
        f"{nodes} node{'s' if nodes > 1 else ''}, "
        f"steps of {plan.batch:,} samples, the fastest first; nothing is trained",
        "",
    ]
    cells = [_HEADER, *(_cells(row) for row in plan.rows)]
    lines += align(cells)
    lines += [
        "  ms/step: predicted; compute, comm: of the busiest rank, ms; some comm may hide behind "
        "compute; bubble: waiting for other stages",
        "  MB sent: of the rank that sends most, in a step; memory: of the rank that needs most, "
        f"{MARGIN:g} x its tensors",
    ]
    if any(row.evaluates for row in plan.rows):
        lines.append("  *: the evaluation takes most: a smaller batch.evaluate takes less")
    lines += ["", *_wrapped(sentence(plan))]
    if plan.excluded:
        lines += ["", "excluded"]
        for reason, names in _by_reason(plan).items():
            lines += _wrapped(f"{'; '.join(names)}: {reason}")
    return [*lines, "", "assumed", *(line for note in plan.assumed for line in _wrapped(note))]


def _cells(row: Row) -> tuple[str, ...]:
    time = row.time
    return (
        row.mesh.name,
        _ms(time.seconds),
        _ms(time.compute_s),
        _ms(time.communication_s),
        f"{time.bubble:.0%}" if row.mesh.pipeline > 1 else "-",
        f"{row.sent_bytes / 1e6:,.2f}",
        gib(row.needs) + "*" * row.evaluates,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _by_reason(plan: MeshPlan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in plan.excluded:
        found.setdefault(each.reason, []).append(each.mesh.name)
    return found


def sentence(plan: MeshPlan) -> str:
    """Which mesh to take, and why."""
    if not plan.rows:
        return (
            "no mesh fits: more ranks, more memory for each, model.recompute=all or a smaller "
            "batch.size"
        )
    best = plan.rows[0]
    close = [row for row in plan.rows[1:] if row.time.seconds <= _CLOSE * best.time.seconds]
    words = (
        f"take {best.mesh.words or 'no key: every rank has the whole model'}, "
        f"{_ms(best.time.seconds)} ms a step: {_why(best, plan)}"
    )
    if close:
        least = min([best, *close], key=lambda row: row.needs)
        words += (
            f"; as fast by prediction (within {_CLOSE - 1:.0%}): "
            f"{'; '.join(row.mesh.name for row in close)}"
        )
        if least is not best:
            words += f", of which {least.mesh.name} needs least memory, {gib(least.needs)}"
    return words


def _why(best: Row, plan: MeshPlan) -> str:
    """Against data parallel ranks with everything, or the best of another kind of mesh."""
    plain = next((row for row in plan.rows if not row.mesh.words), None)
    if plain is None:
        kinds = "every rank with the whole model does not fit"
        return f"{kinds}, and of the meshes that do it takes least time"
    if best is plain:
        other = next(
            (row for row in plan.rows if row.mesh.pipeline > 1 or row.mesh.tensor > 1), None
        )
        if other is None:
            return "nothing that is cut is faster"
        return (
            f"its gradients take {_ms(best.time.communication_s)} ms, once a step, and "
            f"{_difference(other, best)}"
        )
    return _difference(plain, best)


def _difference(slower: Row, faster: Row) -> str:
    """What the slower one has more of: of communication, computing and waiting that which is
    most."""
    wait_s = [row.time.bubble * row.time.seconds for row in (slower, faster)]
    more = {
        "communication": (slower.time.communication_s, faster.time.communication_s),
        "computing and update": (slower.time.compute_s, faster.time.compute_s),
        "waiting for other stages": (wait_s[0], wait_s[1]),
    }
    kind = max(more, key=lambda name: more[name][0] - more[name][1])
    return (
        f"{slower.mesh.name} has {_ms(more[kind][0])} ms of {kind}, this one {_ms(more[kind][1])}"
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def mesh_json(plan: MeshPlan) -> dict[str, Any]:
    """Seconds and bytes."""
    machine = plan.machine
    return {
        "ranks": plan.ranks,
        "batch": plan.batch,
        "machine": {
            "flops_per_s": machine.flops_per_s,
            "touched_bytes_per_s": machine.touched_bytes_per_s,
            "updated_bytes_per_s": machine.updated_bytes_per_s,
            "inside": {
                "latency_s": machine.inside.latency_s,
                "bytes_per_s": machine.inside.bytes_per_s,
            },
            "between": {
                "latency_s": machine.between.latency_s,
                "bytes_per_s": machine.between.bytes_per_s,
            },
            "ranks_per_node": machine.per_node,
            "in_parts": machine.in_parts,
        },
        "assumed": plan.assumed,
        "meshes": [
            {
                "mesh": row.mesh._asdict(),
                "words": row.mesh.words.split(),
                "seconds": row.time.seconds,
                "compute_s": row.time.compute_s,
                "communication_s": row.time.communication_s,
                "bubble": row.time.bubble,
                "sent_bytes": row.sent_bytes,
                "memory_bytes": row.needs,
            }
            for row in plan.rows
        ],
        "excluded": [
            {"mesh": each.mesh._asdict(), "words": each.mesh.words.split(), "reason": each.reason}
            for each in plan.excluded
        ],
        "advice": sentence(plan),
    }


_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_BAR = 30  # characters of the slowest stage's


class Cut(NamedTuple):
    """Where the model is cut, and by what."""

    by: str  # as parallel.balance
    first: list[int]  # the first unit of each stage


class Bubble(NamedTuple):
    """The share of a step in which a rank waits, 0 to 1."""

    micro: int  # micro-batches of the step
    schedule: Schedule
    by: str
    formula: float  # of equal stages
    measured_times: float


class PipelinePlan(NamedTuple):
    """The plan of one pipeline: what --pipeline shows."""

    config: Config  # of one pipeline
    samples: int  # of a micro-batch
    micro: int  # micro-batches of a step
    units: list[UnitCost]
    cuts: list[Cut]  # of this schedule; the job's first
    bubbles: list[Bubble]


def pipeline_plan(config: Config, task: Task, ranks: int) -> PipelinePlan:
    """Measures the units of the model in this process. `ranks`: of the pipeline, where
    parallel.pipeline=1. Raises UserError."""
    if config.parallel.pipeline == 1:
        config = config.replace(parallel=config.parallel.replace(pipeline=ranks))
    # no rank has the whole model to draw with
    config = config.replace(log=config.log.replace(samples=0))
    config = resolve_batch_size(config, config.parallel.ranks)
    refuse_on_every_engine(config, config.parallel.ranks)
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    batch = config.batch.size
    micro = passes_of_step(config, batch, batch, batch)
    samples = -(-batch // micro)
    units: list[UnitCost] = framework.unit_costs(config, task, samples)
    stages = config.parallel.pipeline * config.parallel.stages_of_rank
    cuts = sorted(_cuts(config, units, stages), key=lambda cut: cut.by != _label(config))
    numbers = sorted({micro, *(factor * config.parallel.pipeline for factor in (1, 2, 4, 8))})
    bubbles = [
        bubble
        for number in numbers
        for schedule in _SCHEDULES
        for bubble in _bubbles(config, units, schedule, number)
    ]
    return PipelinePlan(config, samples, micro, units, cuts, bubbles)


def _label(config: Config) -> str:
    balance = config.parallel.balance
    return ",".join(map(str, balance)) if isinstance(balance, list) else balance


def _cuts(config: Config, units: Sequence[UnitCost], stages: int) -> list[Cut]:
    """By operations, by seconds, and as the job gives them, where that is for so many stages."""
    from hvdtrain.frameworks.torch.parallel.pipeline.cuts import (
        balanced_cuts,
        given_cuts,
    )  # torch, which other plans do without

    balance = config.parallel.balance
    found = [
        Cut("operations", balanced_cuts([unit.operations for unit in units], stages)),
        Cut("seconds", balanced_cuts([sum(unit.seconds) for unit in units], stages)),
    ]
    if isinstance(balance, list) and len(balance) == stages:
        found.append(
            Cut(
                _label(config),
                given_cuts(
                    balance, [unit.name for unit in units], config.where("parallel.balance")
                ),
            )
        )
    return found


def _bubbles(
    config: Config, units: Sequence[UnitCost], schedule: Schedule, micro: int
) -> list[Bubble]:
    """None where the model has fewer units than stages."""
    ranks = config.parallel.pipeline
    virtual = (config.parallel.virtual or 2) if schedule == "interleaved" else 1
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
    """Units, the stages of each cut, and the shares of waiting."""
    parallel = plan.config.parallel
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


def _stages(plan: PipelinePlan, cut: Cut) -> list[str]:
    """A bar for each."""
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


def _ranges(cut: Cut, units: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*cut.first, units]))


def _counts(plan: PipelinePlan, cut: Cut) -> str:
    """Units of each stage as parallel.balance takes them: 3,3"""
    return ",".join(str(stop - start) for start, stop in _ranges(cut, len(plan.units)))


def _names(units: Sequence[UnitCost]) -> str:
    return units[0].name + (f" ... {units[-1].name}" if len(units) > 1 else "")


def _shares(plan: PipelinePlan) -> list[str]:
    """A row for each schedule and cut, a column for each number of micro-batches."""
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
        is_of_job = (schedule, by) == (plan.config.parallel.schedule, _label(plan.config))
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
    """The plan for programs, in seconds and shares of 1."""
    return {
        "pipeline": plan.config.parallel.pipeline,
        "schedule": plan.config.parallel.schedule,
        "balance": plan.config.parallel.balance,
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

"""A plan as lines and as JSON: data, recipe, a row for each number of ranks, parameters, and the
memory of one rank."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvdtrain.cli.output import align
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.extras.plan.forecast.job import (
    BatchPhase,
    Forecast,
    Infeasible,
    Shapes,
    group_by_recipe,
    memory,
)
from hvdtrain.extras.plan.forecast.memory import MemoryPlan, memory_lines
from hvdtrain.frameworks.by_name import decay
from hvdtrain.optim.groups import ScaledRule
from hvdtrain.optim.rule import Rule, is_excluded
from hvdtrain.optim.thawing import Thawed
from hvdtrain.optim.weight_average import without_average
from hvdtrain.recipe.summary import batch_summary, lr_summary, noise_summary
from hvdtrain.tasks.task import Task

_WIDTH = 100  # characters of a line; the name of a parameter may be longer
_MOST_NAMES = 8  # names of parameters without decay, unless --all
_HEADER = (
    "ranks",
    "batch",
    "each",
    "passes",
    "epochs",
    "steps/epoch",
    "steps",
    "lr: start",
    "warm",
    "end",
    "momentum",
)
_NOTES = (
    "batch: samples of a step over all ranks; each: of one rank; passes: forward passes of one "
    "rank",
    "steps/epoch: samples / batch; a step may start in one epoch and end in the next",
    "lr: of the first step, of the first step after the warm-up, of the last step",
)


class Plan(NamedTuple):
    """The plan that the lines print."""

    config: Config
    task: Task
    samples: int  # training samples
    origin: str  # source of task and samples, for people
    forecasts: Sequence[Forecast | Infeasible]  # by number of ranks
    shapes: Shapes
    rule: Rule | None  # None: a class of torch.optim


def plan_lines(plan: Plan, all_names: bool, memory: MemoryPlan | None = None) -> list[str]:
    """Returns all lines, with empty lines between sections. all_names: name every parameter without
    decay."""
    feasible = [one for one in plan.forecasts if isinstance(one, Forecast)]
    sections = [
        ["hvdtrain plan: what the job would do; nothing is trained", "", *_data_and_model(plan)],
        _recipes(plan, feasible),
        [*_table(plan.forecasts), *_notes(plan, feasible)],
        _parameters(plan, len(plan.shapes) if all_names else _MOST_NAMES),
        _memory(plan) if memory is None else memory_lines(memory),
    ]
    return [line for section in sections for line in ("", *section)][1:]


def ranks_label(group: Sequence[Forecast]) -> str:
    """Formats numbers of ranks: 1, 8, 64 ranks."""
    return f"{', '.join(str(one.ranks) for one in group)} rank{'s' if group[-1].ranks > 1 else ''}"


def one_line(error: UserError) -> str:
    """Returns the error and its fix in one line."""
    return f"{error.what}; fix: {error.fix}" if error.fix else error.what


def batch_label(forecast: Forecast) -> str:
    """Returns the global batch; if it changes, the first and the last: 64>200"""
    return _from_to(f"{forecast.batch_phases[0].batch:,}", f"{forecast.batch_phases[-1].batch:,}")


def _data_and_model(plan: Plan) -> list[str]:
    config = plan.config
    return [
        *_labelled(
            "data", f"{plan.samples:,} training samples, {plan.task.details} ({plan.origin})"
        ),
        *_labelled(
            "model",
            f"{config.model.name}: {_count(plan.shapes)}, framework={config.framework}, "
            f"{config.speed.precision}",
        ),
        *_labelled("optimizer", f"{config.optim.name}, {_decay(config)}"),
    ]


def _recipes(plan: Plan, feasible: list[Forecast]) -> list[str]:
    """Returns the arithmetic of each distinct recipe."""
    lines = []
    for group in group_by_recipe(feasible):
        lines += _labelled("recipe", f"on {ranks_label(group)}")
        lines += _labelled("", lr_summary(group[0].config, plan.samples, group[0].context))
        lines += _labelled("", f"batch {batch_summary(group[0].recipe)}")
        lines += _labelled("", noise_summary(group[0].config))
    return lines


def _table(forecasts: Sequence[Forecast | Infeasible]) -> list[str]:
    """Returns a line for each number of ranks, or why the job cannot run on it."""
    rows = {one.ranks: _cells(one) for one in forecasts if isinstance(one, Forecast)}
    first = max(len(_HEADER[0]), *(len(str(one.ranks)) for one in forecasts))
    lines = align([_HEADER, *rows.values()], left=(), least=(first,))
    if len(lines[0]) > _WIDTH:
        lines = align([_HEADER, *rows.values()], left=(), gap=" ", least=(first,))
    of_ranks = dict(zip(rows, lines[1:], strict=True))
    table = lines[:1]
    for one in forecasts:
        if isinstance(one, Forecast):
            table.append(of_ranks[one.ranks])
        else:
            start = f"{one.ranks:>{first}}  impossible: "
            table += textwrap.wrap(
                one_line(one.error),
                _WIDTH,
                initial_indent=start,
                subsequent_indent=" " * (first + 2),
            )
    return table


def _cells(forecast: Forecast) -> list[str]:
    """Returns a row of the table."""
    first_batch = forecast.batch_phases[0].batch
    last_batch = forecast.batch_phases[-1].batch
    first = forecast.hyper(0)
    warm = forecast.after_warmup()
    last = forecast.hyper(forecast.steps - 1)
    return [
        str(forecast.ranks),
        batch_label(forecast),
        _from_to(_share(forecast, first_batch), _share(forecast, last_batch)),
        _from_to(
            f"{forecast.forward_passes(first_batch):,}", f"{forecast.forward_passes(last_batch):,}"
        ),
        f"{forecast.epochs:.4g}" if forecast.epochs < 1000 else f"{forecast.epochs:,.0f}",
        _from_to(f"{forecast.dataset / first_batch:,.1f}", f"{forecast.dataset / last_batch:,.1f}"),
        f"{forecast.steps:,}",
        f"{first.lr:.4g}",
        f"{warm.lr:.4g}" if warm else "never",
        f"{last.lr:.4g}",
        "its own" if has_momentum_of_its_class(forecast.config) else f"{first.momentum:g}",
    ]


def _share(forecast: Forecast, batch: int) -> str:
    """Formats a rank's share: 64, or 21-22."""
    fewest, most = forecast.samples_per_rank(batch)
    return f"{fewest:,}" if fewest == most else f"{fewest:,}-{most:,}"


def _notes(plan: Plan, feasible: list[Forecast]) -> list[str]:
    notes = list(_NOTES)
    if any(len(one.batch_phases) > 1 for one in feasible):
        notes.append("a>b: the batch changes from a to b, maybe in several steps")
    config = plan.config
    if config.stop.target is not None:
        notes.append(
            f"the job ends early once validation {plan.task.objective} {config.stop.target:g} is "
            "held (stop.target)"
        )
    if config.stop.time is not None:
        notes.append(f"the job ends early after stop.time={config.stop.time}")
    return [
        wrapped
        for note in notes
        for wrapped in textwrap.wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    ]


def _parameters(plan: Plan, most_names: int) -> list[str]:
    """Describes which parameters have weight decay and layer-wise ratios, and which are
    excluded."""
    excludes = plan.config.optim.exclude == "norms_and_biases"
    excluded = {
        name: shape for name, shape in plan.shapes.items() if excludes and is_excluded(shape)
    }
    included = {name: shape for name, shape in plan.shapes.items() if name not in excluded}
    has_trust_ratio = plan.rule is not None and plan.rule.of_parameter(
        "", (1,), True
    ) != plan.rule.of_parameter("", (1,), False)
    with_both, without = (
        ("decayed and adapted layer by layer", "neither")
        if has_trust_ratio
        else ("decayed", "not decayed")
    )
    lines = _labelled("parameters", f"{_count(included)}: {with_both}")
    if not excluded:
        lines += _labelled("", f"{without}: none (optim.exclude={plan.config.optim.exclude})")
    else:
        lines += _labelled("", f"{_count(excluded)}: {without}: {_listed(excluded, most_names)}")
    for rule, shapes in _of_other_rules(plan).items():
        lines += _labelled("", f"{_count(shapes)}: by {rule}: {_listed(shapes, most_names)}")
    return lines


def _listed(names: Iterable[str], most: int) -> str:
    some = list(names)
    return ", ".join(
        some
        if len(some) <= most
        else [*some[:most], f"and {len(some) - most} more (--all lists them)"]
    )


def _of_other_rules(plan: Plan) -> dict[str, Shapes]:
    """Describes the parameters that another rule than optim.name updates, and the parameters of
    optim.groups."""
    shapes_of_rule: dict[str, Shapes] = {}
    if plan.rule is None:
        return shapes_of_rule
    for name, shape in plan.shapes.items():
        rule = without_average(plan.rule.of_parameter(name, shape, False))
        rule = rule.rule if isinstance(rule, Thawed) else rule
        if isinstance(rule, ScaledRule):
            shapes_of_rule[f"{rule}"] = {**shapes_of_rule.get(f"{rule}", {}), name: shape}
    return shapes_of_rule


def _memory(plan: Plan) -> list[str]:
    """Returns a table, in MiB, of the memory that does not depend on the batch."""
    found = memory(plan.shapes, plan.rule, plan.config.speed.precision)
    digits = 1 if found.weights >= 10 * 2**20 else 4

    def row(label: str, size_bytes: int | None, note: str = "") -> str:
        size = (
            "known only after its first step"
            if size_bytes is None
            else _mib(size_bytes, digits).rjust(10)
        )
        return f"  {label:20} {size}   {note}".rstrip()

    total = found.weights + found.gradients + (found.optimizer_state or 0)
    lines = [
        f"memory of one rank, MiB ({plan.config.speed.precision}); without activations, running "
        "statistics and workspace",
        row("weights", found.weights),
        row("gradients", found.gradients),
        row("optimizer state", found.optimizer_state),
    ]
    sum_label = "sum" if found.optimizer_state is not None else "sum of what is known"
    if not _may_use_buckets(plan):
        return [*lines, row(sum_label, total)]
    strategy = "comm.reduce=bucket" + (
        " (auto without Horovod)" if plan.config.comm.reduce == "auto" else ""
    )
    return [
        *lines,
        row("reduction buffers", found.buckets, f"with {strategy}, 2 ranks or more"),
        row(sum_label, total + found.buckets, f"without these buffers {_mib(total, digits)}"),
    ]


def _may_use_buckets(plan: Plan) -> bool:
    """Whether a forecast of the plan may reduce gradients in hvdtrain's buckets."""
    several_ranks = any(one.ranks > 1 for one in plan.forecasts)
    return (
        several_ranks
        and plan.config.framework == "torch"
        and plan.config.comm.reduce != "distributed_optimizer"
    )


def _mib(size_bytes: int, digits: int) -> str:
    return f"{size_bytes / 2**20:,.{digits}f}"


def has_momentum_of_its_class(config: Config) -> bool:
    """Whether the momentum is the default of a torch.optim class, because the configuration does
    not set it."""
    return config.optim.momentum is None and "." in config.optim.name


def _decay(config: Config) -> str:
    """Formats the decay: weight decay 0.0001."""
    found = decay(config)
    own = f", the default of {config.optim.name}" if config.optim.weight_decay is None else ""
    return "no weight decay" if found is None else f"weight decay {found:g}{own}"


def _count(shapes: Shapes) -> str:
    return (
        f"{len(shapes):,} tensor{'s' if len(shapes) != 1 else ''}, "
        f"{sum(map(math.prod, shapes.values())):,} numbers"
    )


def _from_to(first: str, last: str) -> str:
    return first if first == last else f"{first}>{last}"


def _labelled(label: str, text: str) -> list[str]:
    """Returns a paragraph to the right of its label."""
    pad = " " * 12
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label:12}",
        subsequent_indent=pad,
        break_long_words=False,
        break_on_hyphens=False,
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Returns the data, the model, a forecast for each number of ranks, and the bytes of one
    rank."""
    config = plan.config
    excludes = config.optim.exclude == "norms_and_biases"
    return {
        "data": {
            "samples": plan.samples,
            **_sizes(plan.task),
            "from": plan.origin,
        },
        "model": {
            "name": config.model.name,
            "framework": config.framework,
            "precision": config.speed.precision,
            "parameters": sum(map(math.prod, plan.shapes.values())),
            "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
            "not_decayed": [
                name for name, shape in plan.shapes.items() if excludes and is_excluded(shape)
            ],
        },
        "forecasts": [_forecast(one) for one in plan.forecasts],
        "memory_bytes": memory(plan.shapes, plan.rule, config.speed.precision)._asdict(),
    }


def _forecast(one: Forecast | Infeasible) -> dict[str, Any]:
    """Returns the forecast for one number of ranks: the job, or `impossible` with the error."""
    if isinstance(one, Infeasible):
        return {
            "ranks": one.ranks,
            "impossible": {"what": one.error.what, "where": one.error.where, "fix": one.error.fix},
        }
    warm = one.after_warmup()
    return {
        "ranks": one.ranks,
        "steps": one.steps,
        "epochs": one.epochs,
        "batches": [_batch(one, phase) for phase in one.batch_phases],
        "first_step": _hyper(one, one.hyper(0)),
        "after_warmup": None if warm is None else _hyper(one, warm),
        "last_step": _hyper(one, one.hyper(one.steps - 1)),
    }


def _batch(one: Forecast, phase: BatchPhase) -> dict[str, Any]:
    """Returns the fields for consecutive steps with one global batch."""
    return {
        "batch": phase.batch,
        "first_step": phase.first_step,
        "steps": phase.steps,
        "samples_per_rank": list(one.samples_per_rank(phase.batch)),
        "forward_passes": one.forward_passes(phase.batch),
    }


def _hyper(one: Forecast, hyper: Hyper) -> dict[str, Any]:
    momentum = None if has_momentum_of_its_class(one.config) else hyper.momentum
    return {
        "lr": hyper.lr,
        "momentum": momentum,
        "weight_decay": decay(one.config),
        "batch": hyper.batch,
    }


def _sizes(task: Task) -> dict[str, Any]:
    """Returns the sizes from which models are built, for JSON."""
    names = [name for name in task.sizes if name != "outputs" or "classes" not in task.sizes]
    return {
        name: list(size) if isinstance(size := task.sizes[name], tuple) else size for name in names
    }

"""A plan in words: data, recipe, a row for each number of ranks, parameters, and the memory of one rank."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.cli.plan.forecast import Forecast, Impossible, Shapes, alike, memory
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Task
from hvdtrain.optim.rule import Rule, is_excluded
from hvdtrain.recipe.summary import batch_summary, lr_summary

_WIDTH = 100  # columns; a name of a parameter may be longer
_NAMES = 8  # parameters named, of many
_HEAD = ("ranks", "batch", "each", "passes", "epochs", "steps/epoch", "steps", "lr: start", "warm", "end", "momentum")
_NOTES = (
    "batch: samples of a step over all ranks; each: of them on one rank, in so many forward passes",
    "steps/epoch: samples / batch; a step may begin in one epoch and end in the next, hence the fraction",
    "lr: of the first step, of the first after the warm-up, of the last",
)


class Plan(NamedTuple):
    """What there is to tell."""

    config: Config
    task: Task
    samples: int  # training samples
    origin: str  # where task and samples come from
    rows: Sequence[Forecast | Impossible]
    shapes: Shapes
    rule: Rule | None  # None: a class of torch.optim


def text(plan: Plan, all_names: bool) -> list[str]:
    """Every line, empty ones between the parts."""
    possible = [row for row in plan.rows if isinstance(row, Forecast)]
    parts = [
        ["hvdtrain plan: what would happen; nothing is trained", "", *_facts(plan)],
        _recipes(plan, possible),
        [*_table(plan.rows), *_notes(plan.config, possible)],
        _parameters(plan, len(plan.shapes) if all_names else _NAMES),
        _memory(plan),
    ]
    return [line for part in parts for line in ("", *part)][1:]


def ranks_words(group: Sequence[Forecast]) -> str:
    """1, 8, 64 ranks"""
    return f"{', '.join(str(row.ranks) for row in group)} rank{'s' * (group[-1].ranks > 1)}"


def reason(error: UserError) -> str:
    """What is wrong and what mends it, on one line."""
    return f"{error.what}; fix: {error.fix}" if error.fix else error.what


def batch_of(row: Forecast) -> str:
    """The global batch, or the first and the last of a batch that changes."""
    return _range(*(f"{stretch.batch:,}" for stretch in (row.stretches[0], row.stretches[-1])))


def _facts(plan: Plan) -> list[str]:
    config, (height, width, channels) = plan.config, plan.task.shape
    images = f"images of {height}x{width} pixels and {channels} channel{'s' * (channels > 1)}"
    return [
        *_labelled("data", f"{plan.samples:,} training samples, {images}, {plan.task.classes:,} classes ({plan.origin})"),
        *_labelled("model", f"{config.model.name}: {_count(plan.shapes)}, framework={config.framework}, {config.speed.precision}"),
        *_labelled("optimizer", f"{config.optim.name}, weight decay {config.optim.weight_decay:g}"),
    ]


def _recipes(plan: Plan, possible: list[Forecast]) -> list[str]:
    """The arithmetic of each recipe that differs."""
    lines = []
    for group in alike(possible):
        lines += _labelled("recipe", f"on {ranks_words(group)}")
        lines += _labelled("", lr_summary(group[0].config, plan.samples))
        lines += _labelled("", f"batch {batch_summary(group[0].recipe)}")
    return lines


def _table(rows: Sequence[Forecast | Impossible]) -> list[str]:
    """A line for each number of ranks, its columns to the right; or why that number is impossible."""
    told = {row.ranks: _cells(row) for row in rows if isinstance(row, Forecast)}
    widths = [max(map(len, column)) for column in zip(_HEAD, *told.values(), strict=True)]
    widths[0] = max(widths[0], *(len(str(row.ranks)) for row in rows))
    lines = [_aligned(_HEAD, widths)]
    for row in rows:
        if isinstance(row, Forecast):
            lines.append(_aligned(told[row.ranks], widths))
        else:
            first = f"{row.ranks:>{widths[0]}}  impossible: "
            lines += textwrap.wrap(reason(row.error), _WIDTH, initial_indent=first, subsequent_indent=" " * (widths[0] + 2))
    return lines


def _cells(row: Forecast) -> list[str]:
    ends = (row.stretches[0].batch, row.stretches[-1].batch)
    first, warm, last = row.hyper(0), row.warm(), row.hyper(row.steps - 1)
    shares = [f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high in map(row.share, ends)]
    return [
        str(row.ranks),
        batch_of(row),
        _range(*shares),
        _range(*(f"{row.passes(batch):,}" for batch in ends)),
        f"{row.epochs:.4g}" if row.epochs < 1000 else f"{row.epochs:,.0f}",
        _range(*(f"{row.dataset / batch:,.1f}" for batch in ends)),
        f"{row.steps:,}",
        f"{first.lr:.4g}",
        f"{warm.lr:.4g}" if warm else "never",
        f"{last.lr:.4g}",
        "its own" if _keeps_momentum(row.config) else f"{first.momentum:g}",
    ]


def _notes(config: Config, possible: list[Forecast]) -> list[str]:
    notes = list(_NOTES)
    if any(len(row.stretches) > 1 for row in possible):
        notes.append("a>b: the batch changes from a to b, perhaps with others between")
    if config.stop.target_accuracy is not None:
        notes.append(f"the job ends sooner where validation accuracy {config.stop.target_accuracy:g} is held (stop.target_accuracy)")
    return [wrapped for note in notes for wrapped in textwrap.wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="    ")]


def _parameters(plan: Plan, most: int) -> list[str]:
    """What decay and layer-wise ratios reach, and what they spare."""
    out = {name: shape for name, shape in plan.shapes.items() if plan.config.optim.exclude == "norms_and_biases" and is_excluded(shape)}
    rest = {name: shape for name, shape in plan.shapes.items() if name not in out}
    adapts = plan.rule is not None and plan.rule.without_trust_ratio() != plan.rule
    does, spares = ("decayed and adapted layer by layer", "neither") if adapts else ("decayed", "not decayed")
    lines = _labelled("parameters", f"{_count(rest)}: {does}")
    if not out:
        return [*lines, *_labelled("", f"{spares}: none (optim.exclude={plan.config.optim.exclude})")]
    folded = [] if len(out) <= most else [f"and {len(out) - most} more (--all names them)"]
    return [*lines, *_labelled("", f"{_count(out)}: {spares}: {', '.join([*list(out)[:most], *folded])}")]


def _memory(plan: Plan) -> list[str]:
    """A table in MiB; what depends on the batch is not in it."""
    held, asked = memory(plan.shapes, plan.rule, plan.config.speed.precision), plan.config.comm.reduce
    digits = 1 if held.weights >= 10 * 2**20 else 4
    known = held.weights + held.gradients + (held.optimizer_state or 0)
    rows: list[tuple[str, int | None, str]] = [("weights", held.weights, ""), ("gradients", held.gradients, "")]
    rows.append(("optimizer state", held.optimizer_state, ""))
    total = (known, "")
    if asked != "distributed_optimizer" and plan.config.framework == "torch" and any(row.ranks > 1 for row in plan.rows):
        when = "with comm.reduce=bucket" + " (auto without Horovod)" * (asked == "auto")
        rows.append(("reduction buffers", held.buckets, f"from 2 ranks on {when}"))
        total = (known + held.buckets, f"without these buffers {known / 2**20:,.{digits}f}")
    rows.append(("sum" if held.optimizer_state is not None else "sum of what is known", *total))
    lines = [f"memory of one rank, MiB ({plan.config.speed.precision}); activations, running statistics and workspace come on top"]
    for label, size, note in rows:
        shown = "known only after its first step" if size is None else f"{size / 2**20:10,.{digits}f}"
        lines.append(f"  {label:20} {shown}   {note}".rstrip())
    return lines


def _keeps_momentum(config: Config) -> bool:
    """A class of torch.optim has the momentum of its constructor where the user names none."""
    return config.optim.momentum is None and "." in config.optim.name


def _count(shapes: Shapes) -> str:
    return f"{len(shapes):,} tensor{'s' * (len(shapes) != 1)}, {sum(map(math.prod, shapes.values())):,} numbers"


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}>{last}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    gap = "  " if sum(widths) + 2 * len(widths) <= _WIDTH + 2 else " "
    return gap.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _labelled(label: str, words: str) -> list[str]:
    """A paragraph beside its label."""
    pad = " " * 12
    return textwrap.wrap(words, _WIDTH, initial_indent=f"{label:12}", subsequent_indent=pad, break_long_words=False, break_on_hyphens=False)

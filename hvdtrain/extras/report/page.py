"""A report as one HTML file without scripts or requests; all text is escaped."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.core.extras import modules
from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError
from hvdtrain.events.redaction import redact_urls
from hvdtrain.extras.compare.differing import differing_environment, differing_keys
from hvdtrain.extras.report import page_tables
from hvdtrain.extras.report.measures import summary
from hvdtrain.extras.report.measures.compare import (
    SHORTEST_S,
    changes_between_starts,
    is_short,
    scaling_comparisons,
)
from hvdtrain.extras.report.measures.mesh import mesh_of, stage_summary
from hvdtrain.records.run import RunRecord, number, objective_of
from hvdtrain.records.table import Table
from hvdtrain.version import __version__

_LAST_EVENTS = 8  # events shown for a run without a regular end
_LONGEST_EVENT = 300  # characters
_MOST_LEADS = (
    # runs up to which each is introduced by a sentence; with more runs, the summary table is enough
    4
)


class PageImage(NamedTuple):
    """A figure of the page."""

    title: str
    description: str  # one sentence; the alternative text too
    url: str  # data:image/...


def render_page(
    runs: Sequence[RunRecord], labels: Sequence[str], images: Sequence[PageImage], command: str
) -> str:
    """Returns the HTML of a report of one run or of several; labels: their short names; command:
    the command line that created the report.

    Raises UserError if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError:
        raise UserError("jinja2 is not installed", "report", "pip install jinja2") from None
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    )
    labelled = list(zip(runs, labels, strict=True))
    several_ranks = len({run.ranks for run in runs}) > 1
    return template.render(
        title=f"Run {labels[0]}" if len(runs) == 1 else f"{len(runs)} runs",
        lead=_sentences(runs, labels, _lead) if len(runs) <= _MOST_LEADS else [],
        warnings=[line for run, label in labelled for line in _warnings(run, label, several_ranks)],
        tables=_tables(runs, labels),
        start=page_tables.startup(runs, labels),
        images=images,
        samples=[
            (label, kind, drawn)
            for run, label in labelled
            for kind in SAMPLE_KINDS
            if (drawn := read_samples(run, kind))
        ],
        stragglers=[
            *_sentences(runs, labels, lambda run: stage_summary(run, summary.rank_work_ms(run))),
            *_sentences(runs, labels, summary.straggler_summary),
        ],
        ranks=page_tables.ranks(runs[0]) if len(runs) == 1 else Table([], []),
        crashes=[
            (label, _last_events(run))
            for run, label in labelled
            if run.end_event.get("kind") not in ("end", "stop")
        ],
        settings=[(label, page_tables.settings(run)) for run, label in labelled if run.config],
        environments=[
            (label, table)
            for run, label in labelled
            if (table := page_tables.environment(run)).rows
        ],
        command=command,
        version=__version__,
    )


def _tables(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[tuple[str, Table]]:
    """Returns (title, table) for the tables that have rows."""
    objective = page_tables.objective_name(runs)
    tables = [
        (f"Runs by {objective}, the best first", page_tables.ranking(runs, labels)),
        ("Summary", page_tables.summary_table(runs, labels)),
    ]
    tables.append((f"Time to {objective}", page_tables.targets(runs, labels)))
    tables.append(("Logged by the script", page_tables.logged(runs, labels)))
    tables.append(("Evaluations", page_tables.evaluations_table(runs, labels)))
    if len(runs) == 1:
        tables.append(("Ranks over time", page_tables.world_sizes(runs[0])))
        tables.append(("Mesh", page_tables.mesh_grid(runs[0])))
        tables.append(("Stages", page_tables.stages(runs[0])))
        tables.append(("Classes in the last evaluation", page_tables.classes(runs[0])))
        for module in modules("tables").values():
            tables += [(title, table_of(runs[0])) for title, table_of in module.TABLES.items()]
    for comparison in scaling_comparisons(runs):
        tables.append((f"More ranks: batch {comparison.batch}", page_tables.scaling(comparison)))
    if len(runs) > 1:
        tables.append(
            (
                "What differs in the configuration",
                page_tables.differing(differing_keys(runs), labels),
            )
        )
        tables.append(
            (
                "What differs in the environment",
                page_tables.differing(differing_environment(runs), labels),
            )
        )
    return [(title, table) for title, table in tables if table.rows]


def _lead(run: RunRecord) -> str:
    """Returns the run in one sentence."""
    mesh = mesh_of(run)
    in_mesh = f" ({mesh.summary})" if mesh else ""
    ranks = f"{run.ranks:,} rank{'s' if run.ranks > 1 else ''}{in_mesh}, " if run.ranks else ""
    time = summary.duration(summary.job_seconds(run))
    objective = objective_of(run)
    best = objective.shown(summary.best_value(run))
    return (
        f"{ranks}{time}, {f'best {objective.name} {best}' if best else 'not evaluated'}; "
        f"{run.ending}"
    )


def _sentences(
    runs: Sequence[RunRecord], labels: Sequence[str], sentence_of: Callable[[RunRecord], str]
) -> list[str]:
    """Returns a sentence about each run that has one, after the run's label if there are
    several."""
    sentences = [(label, sentence_of(run)) for run, label in zip(runs, labels, strict=True)]
    return [
        f"{label}: {sentence}" if len(runs) > 1 else sentence
        for label, sentence in sentences
        if sentence
    ]


def _warnings(run: RunRecord, label: str, several_ranks: bool) -> list[str]:
    """Warnings that limit a run's results. several_ranks: the report has runs on different numbers
    of ranks."""
    lines = []
    nonfinite = run.events_of("nonfinite")
    if nonfinite:
        first = nonfinite[0]
        last = nonfinite[-1]
        steps = (
            f"step {first['step']}"
            if len(nonfinite) == 1
            else f"{len(nonfinite)} times, steps {first['step']} to {last['step']}"
        )
        lines.append(f"a loss or gradient was not finite: {steps}; policy {last.get('policy')}")
    failed = run.events_of("checkpoint_failed")
    if failed:
        last = failed[-1]
        reason = redact_urls(str(last.get("reason")))
        lines.append(
            f"{len(failed)} checkpoint{'s' if len(failed) > 1 else ''} could not be written, the "
            f"last at step {last['step']}: {reason}"
        )
    if not run.config:
        lines.append("config.yaml is missing or cannot be read: the run is compared with no other")
    changes = changes_between_starts(run)
    if changes:
        lines.append(f"{changes}: the run is left out of the comparisons of ranks")
    elif several_ranks and is_short(run):
        time = summary.duration(summary.job_seconds(run))
        lines.append(
            f"a job of {time} says nothing about speed: the run is left out of the comparisons of "
            f"ranks ({SHORTEST_S:g} s or more)"
        )
    return [f"{label}: {line}" for line in lines]


def _last_events(run: RunRecord) -> str:
    lines = (
        redact_urls(json.dumps(_rounded(event), ensure_ascii=False))
        for event in run.events[-_LAST_EVENTS:]
    )
    return "\n".join(
        line if len(line) <= _LONGEST_EVENT else f"{line[:_LONGEST_EVENT]} ..." for line in lines
    )


def _rounded(value: Any) -> Any:
    """Returns numbers with six digits, for people; `time` keeps all of its digits."""
    if isinstance(value, dict):
        return {key: inner if key == "time" else _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class SampleKind(NamedTuple):
    """A kind of sample files that a job wrote, and how the page shows them."""

    stem: str  # of the names of its files in RUN/samples
    title: str
    note: str
    alternative: str  # the beginning of a picture's alternative text
    most: int  # steps to show; if there are more, the first, the last and some between


SAMPLE_KINDS = (
    SampleKind(
        "step",
        "What the model draws",
        "The same random numbers in every row: what changes is the model.",
        "images that the model draws",
        12,
    ),
    SampleKind(
        "masks",
        "Masks",
        "Samples of the validation set: the image, its mask, and the class that the model says of "
        "each pixel.",
        "images, their masks and the model's masks",
        3,
    ),
    SampleKind(
        "maps",
        "Maps",
        "Samples of the validation set: the truth, the model's map and their difference. Points "
        "without a value are grey.",
        "maps, the model's maps and their difference",
        3,
    ),
)
MOST_BYTES = 2**22  # of a file
_NAME = re.compile(r"([a-z]+)-(\d{8,15})\.(png|txt)")
_PNG = b"\x89PNG\r\n\x1a\n"


class Drawn(NamedTuple):
    """One row of the page; either `url` or `text` is empty."""

    title: str  # "step 120: val loss 1.273"
    url: str  # data:image/png
    text: str


def read_samples(run: RunRecord, kind: SampleKind) -> list[Drawn]:
    """Reads the samples of a kind. A file that is not a picture or text, or cannot be read, is
    skipped."""
    try:
        with Folder.open(run.folder, "samples") as folder:
            names = [(match, name) for name in folder.names() if (match := _NAME.fullmatch(name))]
            found = sorted((int(match[2]), name) for match, name in names if match[1] == kind.stem)
            shown = [
                _read(folder, name, _title(run, step)) for step, name in evenly(found, kind.most)
            ]
    except OSError:
        return []
    return [drawn for drawn in shown if drawn]


def evenly(items: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """Selects at most `most` items, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _title(run: RunRecord, step: int) -> str:
    objective = objective_of(run)
    value = next(
        (
            number(event, f"val_{objective.name}")
            for event in run.epoch_events()
            if event["step"] == step
        ),
        None,
    )
    shown = "" if value is None else objective.shown(value)
    return f"step {step:,}" + (f": validation {objective.name} {shown}" if shown else "")


def _read(folder: Folder, name: str, title: str) -> Drawn | None:
    try:
        data = folder.read(name, MOST_BYTES)
    except (OSError, ValueError):
        return None
    if name.endswith(".txt"):
        return Drawn(title, "", data.decode(errors="replace"))
    return (
        Drawn(title, f"data:image/png;base64,{base64.b64encode(data).decode()}", "")
        if data.startswith(_PNG)
        else None
    )

"""A report as one HTML file that needs nothing else: no script, no request, every text escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UserError
from hvdtrain.events.redaction import redact_urls
from hvdtrain.report import page_tables, summary
from hvdtrain.report.compare import changed_places, comparisons, differing
from hvdtrain.report.page_tables import Table
from hvdtrain.report.run import Record
from hvdtrain.version import __version__

_LAST_EVENTS, _LONGEST_LINE = 8, 300
_MOST_LEADS = 4  # runs; the summary tells the same of many


class Image(NamedTuple):
    """A figure of the page."""

    title: str
    about: str
    address: str  # data:image/...


def page(records: Sequence[Record], labels: Sequence[str], images: Sequence[Image], command: str) -> str:
    """The HTML."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError:
        raise UserError("jinja2 is not installed", "report", "pip install 'hvdtrain[report]'") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=f"Run {labels[0]}" if len(records) == 1 else f"{len(records)} runs",
        lead=_of_each(records, labels, _lead) if len(records) <= _MOST_LEADS else [],
        warnings=[line for record, label in zip(records, labels, strict=True) for line in _warnings(record, label)],
        tables=_tables(records, labels),
        start=page_tables.startup(records, labels),
        images=images,
        stragglers=_of_each(records, labels, summary.straggler_words),
        ranks=page_tables.ranks(records[0]) if len(records) == 1 else Table([], []),
        crashes=[(label, _last_events(record)) for record, label in zip(records, labels, strict=True) if _is_cut_off(record)],
        settings=[(label, page_tables.settings(record)) for record, label in zip(records, labels, strict=True) if record.config],
        command=command,
        version=__version__,
    )


def _tables(records: Sequence[Record], labels: Sequence[str]) -> list[tuple[str, Table]]:
    """(title, table) of those that have a row."""
    tables = [("Summary", page_tables.facts(records, labels)), ("Time to accuracy", page_tables.targets(records, labels))]
    tables += [(f"More ranks: batch {found.batch}", page_tables.comparison(found)) for found in comparisons(records)]
    if len(records) > 1:
        tables.append(("What differs in the configuration", page_tables.differing(differing(records), labels)))
    return [(title, table) for title, table in tables if table.rows]


def _lead(record: Record) -> str:
    """The run in one sentence."""
    accuracy = page_tables.percent(summary.best_accuracy(record))
    ranks = f"{record.ranks:,} rank{'s' * (record.ranks > 1)}, " if record.ranks else ""
    time = summary.duration(summary.job_seconds(record))
    return f"{ranks}{time}, {f'best accuracy {accuracy}' if accuracy else 'not evaluated'}; {record.ending}"


def _of_each(records: Sequence[Record], labels: Sequence[str], words: Callable[[Record], str]) -> list[str]:
    """A sentence of each run that has one, after its name where there are several."""
    told = [(label, words(record)) for record, label in zip(records, labels, strict=True)]
    return [f"{label}: {sentence}" if len(records) > 1 else sentence for label, sentence in told if sentence]


def _warnings(record: Record, label: str) -> list[str]:
    """What a reader of the accuracy must know."""
    lines = []
    if found := record.of("nonfinite"):
        steps = f"step {found[0]['step']}" if len(found) == 1 else f"{len(found)} times, steps {found[0]['step']} to {found[-1]['step']}"
        lines.append(f"a loss or gradient was not finite: {steps}; policy {found[-1].get('policy')}")
    if found := record.of("checkpoint_failed"):
        last = f"the last at step {found[-1]['step']}: {redact_urls(str(found[-1].get('reason')))}"
        lines.append(f"{len(found)} checkpoint{'s' * (len(found) > 1)} could not be written, {last}")
    if not record.config:
        lines.append("config.yaml is missing or cannot be read: the run is compared with no other")
    if moved := changed_places(record):
        lines.append(f"{moved}: the run stands in no comparison of ranks")
    return [f"{label}: {line}" for line in lines]


def _is_cut_off(record: Record) -> bool:
    return record.end.get("kind") not in ("end", "stop")


def _last_events(record: Record) -> str:
    lines = (redact_urls(json.dumps(_rounded(event), ensure_ascii=False)) for event in record.events[-_LAST_EVENTS:])
    return "\n".join(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines)


def _rounded(value: Any) -> Any:
    """Numbers of six digits: lines that people read. Times stay whole."""
    if isinstance(value, dict):
        return {key: one if key == "time" else _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value

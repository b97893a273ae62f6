"""The tables of a report's page: what is told of one run, and of several side by side."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.events import redaction
from hvdtrain.report import summary
from hvdtrain.report.compare import Comparison, Spread, batch_of
from hvdtrain.report.run import Record, number

_MOST_RANKS = 32  # rows: the slowest
_MOST_HOSTS = 8


class Table(NamedTuple):
    """Cells are texts as they are shown; the page escapes them."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""


def shown(value: float, form: str = "") -> str:
    """Four digits, or all of a whole number's; empty where it is not known."""
    return format(value, form or (",.0f" if abs(value) >= 1000 else ".4g")) if math.isfinite(value) else ""


def percent(value: float) -> str:
    return f"{100 * value:.2f}%" if math.isfinite(value) else ""


def facts(records: Sequence[Record], labels: Sequence[str]) -> Table:
    """A column for each run; a fact that no run tells is left out."""
    columns = [_facts(record) for record in records]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", *labels], [row for row in rows if any(row[1:])])


def _facts(record: Record) -> dict[str, str]:
    start, best, last = record.start, summary.best_accuracy(record), summary.last_accuracy(record)
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.events[0]["time"]))
    starts = len(record.of("start"))
    return {
        "folder": str(record.folder),
        "ending": record.ending,
        "begun": begun + (f", in {starts} starts" if starts > 1 else ""),
        "ranks": shown(number(start, "ranks"), ",.0f"),
        "hosts": _hosts(start.get("hosts")),
        "engine": _text(start.get("engine")),
        "framework": _text(start.get("framework") or record.config.get("framework")),
        "device": _text(start.get("device")),
        "model": _text(start.get("model") or record.config.get("model.name")),
        "parameters": shown(number(start, "parameters"), ",.0f"),
        "training samples": shown(number(start, "samples"), ",.0f"),
        "global batch at first": shown(batch_of(record), ",g"),
        "epochs": shown(summary.epochs_done(record)),
        "best accuracy": percent(best) or "not evaluated",
        "last accuracy": percent(last) or "not evaluated",
        "time": summary.duration(summary.job_seconds(record)),
        "images/s": shown(summary.images_per_s(record)),
        "energy per image": summary.energy_words(record),
        "hvdtrain": _text(start.get("version")),
    }


def _hosts(hosts: Any) -> str:
    if not isinstance(hosts, list):
        return ""
    names = ", ".join(map(_text, hosts[:_MOST_HOSTS]))
    return names if len(hosts) <= _MOST_HOSTS else f"{names}, ... ({len(hosts):,} hosts)"


def targets(records: Sequence[Record], labels: Sequence[str]) -> Table:
    """Time to accuracy."""
    rows = []
    for record, label in zip(records, labels, strict=True):
        for target in summary.targets(record):
            joules = shown(target.joules) or "not measured"
            numbers = [summary.duration(target.seconds), shown(target.epochs), shown(target.images, ",.0f"), joules]
            rows.append([label, percent(target.accuracy), *numbers])
    return Table(["run", "target", "time", "epochs", "images", "energy (J)"], rows)


def differing(keys: Sequence[tuple[str, list[Any]]], labels: Sequence[str]) -> Table:
    rows = [[key, *(_text(redaction.redact({key: value})[key]) for value in values)] for key, values in keys]
    return Table(["key", *labels], rows)


def comparison(found: Comparison) -> Table:
    """Rows by ranks."""
    head = ["ranks", "seeds", "images/s", "speed-up", "efficiency", "time (s)", "last accuracy (%)", "J per image", "energy ratio"]
    rows = [
        [
            f"{row.ranks:,}",
            row.seeds,
            _spread(row.images_per_s),
            shown(row.speed_up, ",.3g"),
            f"{100 * row.efficiency:.1f}%" if math.isfinite(row.efficiency) else "",
            _spread(row.seconds),
            _spread(Spread(100 * row.accuracy.mean, 100 * row.accuracy.sd, row.accuracy.n)),
            _spread(row.joules_per_image),
            shown(row.energy_ratio, ".3g"),
        ]
        for row in found.rows
    ]
    note = f"Against {found.rows[0].ranks} rank{'s' * (found.rows[0].ranks > 1)}. Mean ± standard deviation of the runs; n: how many."
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return Table([head[place] for place in kept], [[row[place] for place in kept] for row in rows], note)


def _spread(spread: Spread) -> str:
    """1,234 ± 12 (n 3)."""
    if not spread.n:
        return ""
    return f"{shown(spread.mean)} ± {shown(float(f'{spread.sd:.2g}'))} (n {spread.n})" if spread.n > 1 else f"{shown(spread.mean)} (n 1)"


def ranks(record: Record) -> Table:
    """Each rank's own work, the slowest first."""
    work, found = summary.rank_work_ms(record), summary.straggler(record)
    if found is None:
        return Table([], [])
    order = sorted((rank for rank in range(len(work)) if math.isfinite(work[rank])), key=lambda rank: -work[rank])
    rows = [
        [
            str(rank),
            summary.host_of(record.start, rank),
            f"{work[rank]:.3f}",
            shown(work[rank] / found.median_ms if found.median_ms else math.nan, ".2f"),
        ]
        for rank in order[:_MOST_RANKS]
    ]
    note = f"The slowest {_MOST_RANKS} of {len(work):,} ranks." if len(order) > _MOST_RANKS else ""
    return Table(["rank", "host", "own work in a step (ms)", "times the median"], rows, note)


def startup(records: Sequence[Record], labels: Sequence[str]) -> Table:
    """Seconds of each phase, of the last start."""
    told = [next(reversed(record.of("started")), {}).get("start_s") for record in records]
    columns = [{str(name): number(one, name) for name in one} if isinstance(one, dict) else {} for one in told]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(shown(column.get(name, math.nan), ".3f") for column in columns)] for name in names]
    sums = ["together", *(shown(sum(summary.finite(column.values())), ".3f") if column else "" for column in columns)]
    return Table(["phase (s)", *labels], [*rows, sums] if rows else [])


def settings(record: Record) -> Table:
    """The whole configuration."""
    return Table(["key", "value"], [[key, _text(value)] for key, value in redaction.redact(record.config).items()])


def _text(value: Any) -> str:
    """Of JSON or YAML; texts without quotes."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)

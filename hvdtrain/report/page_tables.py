"""The tables of a report's page: of one run, and of several side by side."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.events import redaction
from hvdtrain.report import summary
from hvdtrain.report.compare import ScalingComparison, Spread, global_batch
from hvdtrain.report.run import RunRecord, number

_MOST_RANKS = 32  # rows: the slowest ranks
_MOST_HOSTS = 8


class Table(NamedTuple):
    """Cells as they are shown; the page escapes them."""

    header: list[str]
    rows: list[list[str]]
    note: str = ""


def shown(value: float, form: str = "") -> str:
    """Four digits, or all of a whole number's, unless a format is given; empty for NaN."""
    if not math.isfinite(value):
        return ""
    return format(value, form or (",.0f" if abs(value) >= 1000 else ".4g"))


def percent(value: float) -> str:
    """Empty for NaN."""
    return f"{100 * value:.2f}%" if math.isfinite(value) else ""


def summary_table(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """A column for each run; a row that is empty in all of them is left out."""
    columns = [_summary_column(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", *labels], [row for row in rows if any(row[1:])])


def _summary_column(run: RunRecord) -> dict[str, str]:
    start = run.start_event
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.events[0]["time"]))
    starts = len(run.events_of("start"))
    return {
        "folder": str(run.folder),
        "ending": run.ending,
        "begun": begun + (f", in {starts} starts" if starts > 1 else ""),
        "ranks": shown(number(start, "ranks"), ",.0f"),
        "hosts": _hosts(start.get("hosts")),
        "engine": _cell(start.get("engine")),
        "framework": _cell(start.get("framework") or run.config.get("framework")),
        "device": _cell(start.get("device")),
        "model": _cell(start.get("model") or run.config.get("model.name")),
        "parameters": shown(number(start, "parameters"), ",.0f"),
        "training samples": shown(number(start, "samples"), ",.0f"),
        "global batch at first": shown(global_batch(run), ",g"),
        "epochs": shown(summary.epochs_done(run)),
        "best accuracy": percent(summary.best_accuracy(run)) or "not evaluated",
        "last accuracy": percent(summary.last_accuracy(run)) or "not evaluated",
        "time": summary.duration(summary.job_seconds(run)),
        "images/s": shown(summary.images_per_s(run)),
        "energy per image": summary.energy_summary(run),
        "hvdtrain": _cell(start.get("version")),
    }


def _hosts(hosts: Any) -> str:
    if not isinstance(hosts, list):
        return ""
    names = ", ".join(map(_cell, hosts[:_MOST_HOSTS]))
    return names if len(hosts) <= _MOST_HOSTS else f"{names}, ... ({len(hosts):,} hosts)"


def targets(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Time to accuracy: a row for each target that a run reached."""
    rows = [
        [
            label,
            percent(target.accuracy),
            summary.duration(target.seconds),
            shown(target.epochs),
            shown(target.images, ",.0f"),
            shown(target.joules) or "not measured",
        ]
        for run, label in zip(runs, labels, strict=True)
        for target in summary.targets(run)
    ]
    return Table(["run", "target", "time", "epochs", "images", "energy (J)"], rows)


def differing(keys: Sequence[tuple[str, list[Any]]], labels: Sequence[str]) -> Table:
    """(key, its value in each run) as rows, secrets hidden."""
    rows = [[key, *(_cell(redaction.redact({key: value})[key]) for value in values)] for key, values in keys]
    return Table(["key", *labels], rows)


def scaling(comparison: ScalingComparison) -> Table:
    """A row for each number of ranks; a column that is empty in all of them is left out."""
    header = ["ranks", "seeds", "images/s", "speed-up", "efficiency", "time (s)", "last accuracy (%)", "J per image", "energy ratio"]
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
        for row in comparison.rows
    ]
    fewest = comparison.rows[0].ranks
    note = f"Relative to {fewest} rank{'s' * (fewest > 1)}. Mean ± standard deviation over the runs; n: how many runs."
    kept = [column for column in range(len(header)) if any(row[column] for row in rows)]
    return Table([header[column] for column in kept], [[row[column] for column in kept] for row in rows], note)


def _spread(spread: Spread) -> str:
    """1,234 ± 12 (n 3)"""
    if not spread.n:
        return ""
    deviation = f" ± {shown(float(f'{spread.sd:.2g}'))}" if spread.n > 1 else ""
    return f"{shown(spread.mean)}{deviation} (n {spread.n})"


def ranks(run: RunRecord) -> Table:
    """Each rank's own work, the slowest first; empty on one rank, and where nothing was measured."""
    slowest = summary.straggler(run)
    if slowest is None:
        return Table([], [])
    work_ms = summary.rank_work_ms(run)
    measured = [rank for rank in range(len(work_ms)) if math.isfinite(work_ms[rank])]
    slowest_first = sorted(measured, key=lambda rank: -work_ms[rank])
    rows = [
        [
            str(rank),
            summary.host_of(run.start_event, rank),
            f"{work_ms[rank]:.3f}",
            shown(work_ms[rank] / slowest.median_ms if slowest.median_ms else math.nan, ".2f"),
        ]
        for rank in slowest_first[:_MOST_RANKS]
    ]
    note = f"The slowest {_MOST_RANKS} of {len(work_ms):,} ranks." if len(measured) > _MOST_RANKS else ""
    return Table(["rank", "host", "own work in a step (ms)", "times the median"], rows, note)


def startup(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Seconds of each phase of the last start, and their sum."""
    columns = [_startup_column(run) for run in runs]
    phases = dict.fromkeys(phase for column in columns for phase in column)
    if not phases:
        return Table(["phase (s)", *labels], [])
    rows = [[phase, *(shown(column.get(phase, math.nan), ".3f") for column in columns)] for phase in phases]
    sums = ["sum", *(shown(sum(summary.finite(column.values())), ".3f") if column else "" for column in columns)]
    return Table(["phase (s)", *labels], [*rows, sums])


def _startup_column(run: RunRecord) -> dict[str, float]:
    seconds = next(reversed(run.events_of("started")), {}).get("start_s")
    return {str(phase): number(seconds, phase) for phase in seconds} if isinstance(seconds, dict) else {}


def settings(run: RunRecord) -> Table:
    """The whole configuration, secrets hidden."""
    return Table(["key", "value"], [[key, _cell(value)] for key, value in redaction.redact(run.config).items()])


def _cell(value: Any) -> str:
    """A value of JSON or YAML; text without quotes, nothing for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)

"""The tables of a report's page, for one run and for several side by side."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.events import redaction
from hvdtrain.extras.compare.differing import environment_of
from hvdtrain.extras.report.measures import mesh, summary
from hvdtrain.extras.report.measures.compare import ScalingComparison, Spread, global_batch, spread
from hvdtrain.extras.report.measures.groups import RunGroup, group_runs
from hvdtrain.extras.report.measures.results import (
    class_results,
    evaluated_data,
    evaluations_of,
    finite_values,
    logged_names,
)
from hvdtrain.records.run import RunRecord, number, objective_of
from hvdtrain.records.table import MOST_RANKS, Table, cell, percent, shown

_MOST_HOSTS = 8
_MOST_COLUMNS = 16  # of the mesh
_MOST_EVALUATIONS = 10  # rows of a run
_MOST_CLASSES = 100  # rows
_MOST_CHANGES = 50  # rows
_ENERGY = "energy per sample"  # a row of the summary


def aligned(values: Sequence[float]) -> list[str]:
    """Formats finite numbers with equally many decimals, four digits for the largest; each with
    four digits of its own if they differ by more than that shows."""
    sizes = [abs(value) for value in values if value]
    if not sizes or all(value == round(value) for value in values):
        return [f"{value:,.0f}" for value in values]
    decimals = 3 - math.floor(math.log10(max(sizes)))
    if not 0 <= decimals <= 6 or max(sizes) > 100 * min(sizes):
        return [shown(value) for value in values]
    return [f"{value:.{decimals}f}" for value in values]


def summary_table(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Returns a column for each run; a row that is empty in all of them is dropped. What none of
    several runs measured is a note instead of a row."""
    columns = [_summary_column(run, objective_name(runs)) for run in runs]
    note = ""
    energy = list(dict.fromkeys(column[_ENERGY] for column in columns))
    if len(runs) > 1 and len(energy) == 1 and energy[0].startswith(summary.NOT_MEASURED):
        note = f"{_ENERGY.capitalize()}: {energy[0]}."
        columns = [{**column, _ENERGY: ""} for column in columns]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", *labels], [row for row in rows if any(row[1:])], note)


def objective_name(runs: Sequence[RunRecord]) -> str:
    """Returns the name of the objective; "objective" if it differs between runs."""
    names = {objective_of(run).name for run in runs}
    return names.pop() if len(names) == 1 else "objective"


def ranking(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Returns a row for each run, or group of runs that differ only in the seed; the best at the
    last evaluation first. Empty for a single run, and for runs with different objectives."""
    objectives = {objective_of(run) for run in runs}
    if len(runs) < 2 or len(objectives) > 1:
        return Table([], [])
    objective = objectives.pop()
    groups = [(group, _last_values(group)) for group in group_runs(runs, labels)]
    sign = 1 if objective.lower_is_better else -1
    groups.sort(key=lambda pair: sign * pair[1].mean if pair[1].n else math.inf)
    rows = [
        [
            group.name,
            objective.shown(last.mean) or "not evaluated",
            objective.shown(last.sd),
            f"{last.n}" if len(group.runs) > 1 else "",
            objective.shown(_mean_of(group, summary.best_value)),
            shown(_mean_of(group, summary.epochs_done), ".2f"),
            summary.duration(_mean_of(group, summary.job_seconds)),
            _endings(group),
        ]
        for group, last in groups
    ]
    several = any(len(group.runs) > 1 for group, _ in groups)
    note = "Means over the seeds; sd: the standard deviation, n: the evaluated runs."
    header = ["run", f"last {objective.name}", "sd", "n", f"best {objective.name}"]
    return Table([*header, "epochs", "time", "ending"], rows, note if several else "").filled()


def _last_values(group: RunGroup) -> Spread:
    return spread([summary.last_value(run) for run in group.runs])


def _mean_of(group: RunGroup, value_of: Callable[[RunRecord], float]) -> float:
    return spread([value_of(run) for run in group.runs]).mean


def _endings(group: RunGroup) -> str:
    """ "done", or of several runs "2 done, 1 failed" """
    counts = Counter(run.ending.partition(":")[0] for run in group.runs)
    if len(group.runs) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {ending}" for ending, count in counts.items())


def _summary_column(run: RunRecord, objective: str) -> dict[str, str]:
    start = run.start_event
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.events[0]["time"]))
    starts = len(run.events_of("start"))
    return {
        "folder": str(run.folder),
        "ending": run.ending,
        "begun": begun + (f", in {starts} starts" if starts > 1 else ""),
        "ranks": shown(number(start, "ranks"), ",.0f"),
        "mesh": mesh.ways(run),
        "hosts": _hosts(start.get("hosts")),
        "engine": cell(start.get("engine")),
        "framework": cell(start.get("framework") or run.config.get("framework")),
        "device": cell(start.get("device")),
        "model": cell(start.get("model") or run.config.get("model.name")),
        "parameters": shown(number(start, "parameters"), ",.0f"),
        "training samples": shown(number(start, "samples"), ",.0f"),
        "global batch at first": shown(global_batch(run), ",g"),
        "epochs": shown(summary.epochs_done(run)),
        f"best {objective}": objective_of(run).shown(summary.best_value(run)) or "not evaluated",
        f"last {objective}": objective_of(run).shown(summary.last_value(run)) or "not evaluated",
        "time": summary.duration(summary.job_seconds(run)),
        "samples/s": shown(summary.samples_per_s(run)),
        **(
            {"tokens/s": shown(tokens)}
            if math.isfinite(tokens := summary.tokens_per_s(run))
            else {}
        ),
        **summary.of_each_device(run),
        "memory of a rank": summary.memory_of_largest_rank(run),
        "without libraries and data": summary.memory_summary(run),
        _ENERGY: summary.energy_summary(run),
        "hvdtrain": cell(start.get("version")),
    }


def _hosts(hosts: Any) -> str:
    if not isinstance(hosts, list):
        return ""
    names = ", ".join(map(cell, hosts[:_MOST_HOSTS]))
    return names if len(hosts) <= _MOST_HOSTS else f"{names}, ... ({len(hosts):,} hosts)"


def targets(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Time to a value of the objective: a row for each target that a run reached."""
    rows = [
        [
            label,
            objective_of(run).shown(target.value),
            summary.duration(target.seconds),
            shown(target.epochs, ".2f"),
            shown(target.samples, ",.0f"),
            shown(target.joules),
        ]
        for run, label in zip(runs, labels, strict=True)
        for target in summary.targets(run)
    ]
    return Table(["run", "target", "time", "epochs", "samples", "energy (J)"], rows).filled()


def logged(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Returns values logged by custom loops: a row for each name of each run."""
    rows = []
    for run, label in zip(runs, labels, strict=True):
        for name in logged_names(run):
            values = finite_values(run, name)
            known = [values[-1], min(values), max(values)] if values else []
            rows.append([label, name, *(aligned(known) or [""] * 3)])
    return Table(
        ["run", "name", "last", "least", "most"],
        rows,
        "Means over the steps between two sync points.",
    )


def evaluations_table(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Returns a row for each call of `evaluate`; the last ones of each run."""
    rows = [
        [
            label,
            cell(evaluation.get("checkpoint")),
            redaction.redact_urls(evaluated_data(evaluation)),
            shown(number(evaluation, "count"), ",.0f"),
            shown(number(evaluation, "loss"), ".4f"),
            objective_of(run).shown(number(evaluation, objective_of(run).name)),
        ]
        for run, label in zip(runs, labels, strict=True)
        for evaluation in evaluations_of(run)[-_MOST_EVALUATIONS:]
    ]
    return Table(["run", "checkpoint", "data", "samples", "loss", objective_name(runs)], rows)


def classes(run: RunRecord) -> Table:
    """Returns classes of the last evaluation, the one with the lowest accuracy first."""
    last = next(reversed(evaluations_of(run)), {})
    results = sorted(class_results(last), key=lambda result: result.accuracy)
    rows = [
        [one.name, shown(one.samples, ",.0f"), percent(one.accuracy), one.mistake]
        for one in results[:_MOST_CLASSES]
    ]
    note = (
        f"The {_MOST_CLASSES} classes with the lowest accuracy, of {len(results):,}."
        if len(results) > _MOST_CLASSES
        else ""
    )
    return Table(["class", "samples", "accuracy", "most often taken for"], rows, note)


def differing(keys: Sequence[tuple[str, list[Any]]], labels: Sequence[str]) -> Table:
    """Returns (key, its value in each run) as rows, secrets hidden."""
    rows = [
        [key, *(cell(redaction.redact({key: value})[key]) for value in values)]
        for key, values in keys
    ]
    return Table(["key", *labels], rows)


def scaling(comparison: ScalingComparison) -> Table:
    """Returns a row for each number of ranks; a column that is empty in all of them is dropped."""
    objective = objective_of(comparison.runs[0])
    scale, unit = (100.0, " (%)") if objective.percent else (1.0, "")
    last = f"last {objective.name}{unit}"
    header = [
        "ranks",
        "seeds",
        "samples/s",
        "speed-up",
        "efficiency",
        "time (s)",
        last,
        "J per sample",
        "energy ratio",
    ]
    rows = [
        [
            f"{row.ranks:,}",
            row.seeds,
            _spread(row.samples_per_s),
            shown(row.speed_up, ",.2f"),
            f"{100 * row.efficiency:.1f}%" if math.isfinite(row.efficiency) else "",
            _spread(row.seconds),
            _spread(Spread(scale * row.last.mean, scale * row.last.sd, row.last.n)),
            _spread(row.joules_per_sample),
            shown(row.energy_ratio, ".2f"),
        ]
        for row in comparison.rows
    ]
    fewest = comparison.rows[0].ranks
    note = (
        f"Relative to {fewest} rank{'s' if fewest > 1 else ''}. Mean ± standard deviation over "
        "the runs; n: how many runs."
    )
    return Table(header, rows, note).filled()


def _spread(values: Spread) -> str:
    """1,234 ± 12 (n 3): the deviation with two digits, and the mean with as many decimals."""
    if not values.n:
        return ""
    if values.n == 1 or not values.sd > 0:
        return f"{shown(values.mean)} (n {values.n})"
    decimals = max(0, 1 - math.floor(math.log10(float(f"{values.sd:.1e}"))))
    return f"{values.mean:,.{decimals}f} ± {values.sd:,.{decimals}f} (n {values.n})"


def ranks(run: RunRecord) -> Table:
    """Returns each rank's own work, the slowest first; empty on one rank, and if nothing was
    measured."""
    slowest = summary.straggler(run)
    if slowest is None:
        return Table([], [])
    work_ms = summary.rank_work_ms(run)
    measured = [rank for rank in range(len(work_ms)) if math.isfinite(work_ms[rank])]
    slowest_first = sorted(measured, key=lambda rank: -work_ms[rank])
    found = mesh.mesh_of(run)
    medians = summary.median_of_stage(run, work_ms)
    rows = [
        [
            str(rank),
            summary.host_of(run.start_event, rank),
            *([found.name(rank) if rank < len(found.places) else ""] if found else []),
            f"{work_ms[rank]:.3f}",
            shown(work_ms[rank] / medians[rank] if medians[rank] else math.nan, ".2f"),
        ]
        for rank in slowest_first[:MOST_RANKS]
    ]
    note = (
        f"The slowest {MOST_RANKS} of {len(work_ms):,} ranks." if len(measured) > MOST_RANKS else ""
    )
    median_name = (
        "times the median of its stage" if found and found.sizes.stage > 1 else "times the median"
    )
    return Table(
        ["rank", "host", *["place"] * bool(found), "own work in a step (ms)", median_name],
        rows,
        note,
    )


def mesh_grid(run: RunRecord) -> Table:
    """Returns the rank and host at each place of the mesh, a row for each place in `data`; empty if
    every rank has a whole model."""
    found = mesh.mesh_of(run)
    if found is None or found.sizes.stage * found.sizes.tensor > _MOST_COLUMNS:
        return Table([], [])
    columns = [place for place in found.places if place.data == 0]
    header = [
        found.name(found.places.index(place)).replace("data 0, ", "").replace(", data 0", "")
        for place in columns
    ]
    rows = []
    for data in range(min(found.sizes.data, MOST_RANKS)):
        ranks = [found.places.index(place._replace(data=data)) for place in columns]
        hosts = [summary.host_of(run.start_event, rank) for rank in ranks]
        rows.append(
            [
                f"data {data}",
                *(
                    f"{rank} on {host}" if host else f"{rank}"
                    for rank, host in zip(ranks, hosts, strict=True)
                ),
            ]
        )
    more = (
        f"The first {MOST_RANKS} of {found.sizes.data:,} rows. "
        if found.sizes.data > MOST_RANKS
        else ""
    )
    return Table(
        ["rank", *header],
        rows,
        f"{more}Ranks of a row read the same samples; ranks of a column have the same part of the "
        "model.",
    )


def stages(run: RunRecord) -> Table:
    """Returns the stages of a pipeline: their work and waiting times."""
    work_ms = summary.rank_work_ms(run)
    rows = [
        [
            f"{number}",
            f"{len(stage.ranks)}",
            shown(stage.work_ms),
            f"{stage.waiting:.0%}" if math.isfinite(stage.waiting) else "",
        ]
        for number, stage in enumerate(mesh.stages(run, work_ms)[:MOST_RANKS])
    ]
    predicted = mesh.predicted_bubble(run)
    note = (
        f"By the schedule, with stages that take the same time, each waits {predicted:.1%}."
        if math.isfinite(predicted)
        else ""
    )
    return Table(
        ["stage", "ranks", "own work in a step (ms)", "waits, of the time of its passes"],
        rows,
        note,
    )


def world_sizes(run: RunRecord) -> Table:
    """Returns a row for each change of the ranks; none if there was no change."""
    found = summary.world_sizes(run)
    rows = [
        [
            shown(change.step, ",.0f"),
            summary.duration(change.seconds),
            shown(change.ranks, ",.0f"),
            _hosts(change.hosts),
            redaction.redact_urls(change.why),
        ]
        for change in found[-_MOST_CHANGES:]
    ]
    note = f"The last {_MOST_CHANGES} of {len(found):,}." if len(found) > _MOST_CHANGES else ""
    return Table(
        ["from step", "after", "ranks", "hosts", "why"], rows if len(found) > 1 else [], note
    )


def startup(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """Returns seconds of each phase of the last start, and their sum."""
    columns = [_startup_column(run) for run in runs]
    phases = dict.fromkeys(phase for column in columns for phase in column)
    if not phases:
        return Table(["phase (s)", *labels], [])
    rows = [
        [phase, *(shown(column.get(phase, math.nan), ".3f") for column in columns)]
        for phase in phases
    ]
    sums = [
        "sum",
        *(
            shown(sum(summary.finite(column.values())), ".3f") if column else ""
            for column in columns
        ),
    ]
    return Table(["phase (s)", *labels], [*rows, sums])


def _startup_column(run: RunRecord) -> dict[str, float]:
    seconds = next(reversed(run.events_of("started")), {}).get("start_s")
    return (
        {str(phase): number(seconds, phase) for phase in seconds}
        if isinstance(seconds, dict)
        else {}
    )


def environment(run: RunRecord) -> Table:
    """Returns what the last start ran with: code, packages, hardware, launcher."""
    rows = [[name, value] for name, value in environment_of(run).items()]
    return Table(["", "value"], rows)


def settings(run: RunRecord) -> Table:
    """Returns the whole configuration, secrets hidden."""
    return Table(
        ["key", "value"],
        [[key, cell(value)] for key, value in redaction.redact(run.config).items()],
    )

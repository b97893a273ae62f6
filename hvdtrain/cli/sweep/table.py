"""The result of a sweep: one row for the trials that differ in the seed alone, the best row first; as text and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hvdtrain.cli.formatting import align
from hvdtrain.cli.sweep.space import SEED, Point
from hvdtrain.cli.sweep.trial import Result, Trial
from hvdtrain.report.objective import ACCURACY, RunMetric

Results = Mapping[Trial, Result]


class Row(NamedTuple):
    """Trials that differ in the seed alone; the numbers are over those that are done."""

    point: Point  # without the seed
    mean: float  # of the objective's last value; NaN where no trial is done
    sd: float  # of a sample; NaN of fewer than two
    best: float  # mean of each trial's best value
    epochs: float
    seconds: float
    trials: tuple[Trial, ...]
    states: str  # "done", or "2 done, 1 failed"
    done: int

    @property
    def values(self) -> dict[str, str]:
        """By key."""
        return dict(argument.split("=", 1) for argument in self.point)


def metric_of(results: Results) -> RunMetric:
    return next((result.metric for result in results.values() if result.values), ACCURACY)


def rows_of(results: Results) -> list[Row]:
    """Sorted by the objective; those without a trial that is done are last."""
    groups: dict[Point, list[Trial]] = {}
    for trial in results:
        groups.setdefault(tuple(argument for argument in trial.point if not argument.startswith(f"{SEED}=")), []).append(trial)
    sign = 1 if metric_of(results).lower_is_better else -1
    rows = [_row(point, {trial: results[trial] for trial in trials}) for point, trials in groups.items()]
    return sorted(rows, key=lambda row: (not math.isfinite(row.mean), sign * row.mean if math.isfinite(row.mean) else 0.0))


def _row(point: Point, results: Results) -> Row:
    done = [result for result in results.values() if result.state == "done" and math.isfinite(result.last)]
    last = [result.last for result in done]
    counts = Counter(result.state for result in results.values())
    states = ", ".join(f"{count} {state}" for state, count in counts.items()) if len(results) > 1 else next(iter(counts))
    return Row(
        point=point,
        mean=_mean(last),
        sd=stdev(last) if len(last) > 1 else math.nan,
        best=_mean([result.best for result in done]),
        epochs=_mean([result.epochs for result in done]),
        seconds=_mean([result.seconds for result in done]),
        trials=tuple(results),
        states=states,
        done=len(done),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def table_lines(rows: Sequence[Row], metric: RunMetric) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    cells = [["", *keys, metric.name, "sd", "n", "best", "epochs", "seconds", "trials", ""]]
    for number, row in enumerate(rows, start=1):
        values = [row.values.get(key, "") for key in keys]
        measured = [metric.shown(row.mean), metric.shown(row.sd), str(row.done), metric.shown(row.best)]
        cells.append([str(number), *values, *measured, _shown(row.epochs, 2), _shown(row.seconds, 1), _numbers(row), row.states])
    return align(cells, left=(len(cells[0]) - 1,))


def _shown(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else ""


def _numbers(row: Row) -> str:
    return ",".join(str(trial.number) for trial in row.trials)


def to_json(rows: Sequence[Row], results: Results, metric: RunMetric) -> dict[str, Any]:
    return {
        "objective": metric.name,
        "better": "min" if metric.lower_is_better else "max",
        "rows": [
            {
                "values": row.values,
                "mean": _finite(row.mean),
                "sd": _finite(row.sd),
                "n": row.done,
                "best": _finite(row.best),
                "epochs": _finite(row.epochs),
                "seconds": _finite(row.seconds),
                "trials": [trial.name for trial in row.trials],
            }
            for row in rows
        ],
        "trials": {trial.name: _trial_json(trial, result) for trial, result in results.items()},
    }


def _trial_json(trial: Trial, result: Result) -> dict[str, Any]:
    found = {"arguments": list(trial.point), "state": result.state, "last": _finite(result.last), "best": _finite(result.best)}
    found |= {"epochs": _finite(result.epochs), "seconds": _finite(result.seconds)}
    return found | ({"error": result.error} if result.error else {})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

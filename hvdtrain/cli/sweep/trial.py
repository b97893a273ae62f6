"""One trial of a sweep: an ordinary run folder, the command that trains in it, and what came of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.cli.sweep.space import Point
from hvdtrain.errors import DIVERGED, DONE, REQUEUE, UserError, short
from hvdtrain.report.objective import ACCURACY, RunMetric, objective_of
from hvdtrain.report.run import RunRecord, number, read_run

State = Literal["done", "diverged", "pruned", "failed", "stopped", "waiting"]
KEPT: tuple[State, ...] = ("done", "diverged", "pruned")  # the same command does not start them again
_LOG_BYTES = 100_000  # of the end of a log
_ABOVE = "the error above ends the"  # in the line after a traceback


class Trial(NamedTuple):
    number: int  # from 1
    point: Point

    @property
    def name(self) -> str:
        return f"trial-{self.number:04}"


class Result(NamedTuple):
    """What is known of a trial by now."""

    state: State
    metric: RunMetric  # the objective
    values: tuple[float, ...]  # of the objective, at each evaluation
    epochs: float
    seconds: float
    error: str  # empty where there is none

    @property
    def last(self) -> float:
        """NaN where there is none."""
        return self.values[-1] if self.values else math.nan

    @property
    def best(self) -> float:
        known = [value for value in self.values if math.isfinite(value)]
        return (min if self.metric.lower_is_better else max)(known, default=math.nan)


def state_of(code: int, was_hopeless: bool) -> State:
    """By the exit code. was_hopeless: it was stopped for its results, not by a signal from outside."""
    if code == DONE:
        return "done"
    if code == REQUEUE:
        return "pruned" if was_hopeless else "stopped"
    return "diverged" if code == DIVERGED else "failed"


def read_result(folder: Path, state: State, error: str = "") -> Result:
    """The result in a run folder, which may not be there yet."""
    run = _run(folder)
    if run is None:
        return Result(state, ACCURACY, (), math.nan, math.nan, error)
    metric = objective_of(run)
    evaluations = run.epoch_events()
    values = tuple(number(event, f"val_{metric.name}") for event in evaluations)
    last = run.last_of_job
    epochs = number(evaluations[-1], "epochs") if evaluations else math.nan
    return Result(state, metric, values, epochs, run.seconds_at(last), error)


def _run(folder: Path) -> RunRecord | None:
    try:
        return read_run(folder)
    except UserError:  # not begun, or ended before its first event
        return None


def error_line(log: Path) -> str:
    """The line of a log that says most about why the job failed: hvdtrain's own, or the last one of a traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError as error:
        return f"no log: {error.strerror}"
    own = [line.removeprefix("hvdtrain: ") for line in lines if line.startswith("hvdtrain: ")]
    raised = [before for before, line in itertools.pairwise(lines) if _ABOVE in line]
    return short([*lines, *raised, *own][-1]) if lines else ""

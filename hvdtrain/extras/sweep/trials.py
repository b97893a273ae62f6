"""The trials of a sweep: run folder, command and result of each, the table of all, and the files
that record them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import yaml

from hvdtrain.cli.output import align
from hvdtrain.config.yaml_reader import compose, leaves, value_of
from hvdtrain.core.folder import Folder
from hvdtrain.errors import BUG, DIVERGED, DONE, REQUEUE, UserError, short
from hvdtrain.extras.sweep.space import SEED, Point
from hvdtrain.records.run import ACCURACY, RunMetric, RunRecord, number, objective_of, read_run

State = Literal["done", "diverged", "pruned", "failed", "stopped", "waiting"]
# the same command does not restart these
KEPT: tuple[State, ...] = (
    "done",
    "diverged",
    "pruned",
)
_LOG_BYTES = 100_000  # bytes read from the end of a log
_ABOVE = "the error above ends the"  # in the line after a traceback


class Trial(NamedTuple):
    number: int  # counted from 1
    point: Point

    @property
    def name(self) -> str:
        return f"trial-{self.number:04}"


class Result(NamedTuple):
    """The state of a trial, and its results so far."""

    state: State
    metric: RunMetric  # the objective
    values: tuple[float, ...]  # values of the objective, at each evaluation
    epochs: float
    seconds: float
    error: str  # empty if there is none

    @property
    def last(self) -> float:
        """The last value; NaN if there is none."""
        return self.values[-1] if self.values else math.nan

    @property
    def best(self) -> float:
        known = [value for value in self.values if math.isfinite(value)]
        return (min if self.metric.lower_is_better else max)(known, default=math.nan)


def state_of(code: int, was_hopeless: bool) -> State:
    """Returns the state for an exit code. was_hopeless: it was stopped because of its results, not
    by an external signal."""
    if code == DONE:
        return "done"
    if code == REQUEUE:
        return "pruned" if was_hopeless else "stopped"
    return "diverged" if code == DIVERGED else "failed"


class ScriptEnd(NamedTuple):
    """How the job of a script ended."""

    code: int  # the exit code of the job
    error: str  # what is wrong with a script that ended well; empty if its log says it


def end_of_script(folder: Path, code: int) -> ScriptEnd:
    """The end of a job whose script ended with this exit code: that may be 0 although the job was
    stopped or failed, and 1 where the job diverged."""
    run = _run(folder)
    ended = number(run.end_event, "exit_code") if run is not None else math.nan
    if code != DONE:
        return ScriptEnd(DIVERGED if code == BUG and ended == DIVERGED else code, "")
    if run is None:
        what = "the script has written no run: it passes sys.argv[1:] to hvdtrain.train() or init()"
        return ScriptEnd(BUG, what)
    if not math.isfinite(ended):
        return ScriptEnd(BUG, "the script ended before its job: a custom loop calls ctx.close()")
    return ScriptEnd(int(ended), "")


def read_result(folder: Path, state: State, error: str = "") -> Result:
    """Reads the result in a run folder, which may not exist yet."""
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
    """Returns the line of a log that best explains why the job failed: hvdtrain's error, or the
    last line of a traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = [
                line.strip()
                for line in file.read().decode(errors="replace").splitlines()
                if line.strip()
            ]
    except OSError as error:
        return f"no log: {error.strerror}"
    own = [line.removeprefix("hvdtrain: ") for line in lines if line.startswith("hvdtrain: ")]
    raised = [before for before, line in itertools.pairwise(lines) if _ABOVE in line]
    return short([*lines, *raised, *own][-1]) if lines else ""


Results = Mapping[Trial, Result]


class PointSummary(NamedTuple):
    """Trials that only differ in the seed; the statistics are over the completed ones."""

    point: Point  # without the seed
    mean: float  # mean of the objective's last value; NaN if no trial is complete
    sd: float  # sample deviation; NaN for fewer than two
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


def rows_of(results: Results) -> list[PointSummary]:
    """Returns rows sorted by the objective; rows without a complete trial are last."""
    groups: dict[Point, list[Trial]] = {}
    for trial in results:
        groups.setdefault(
            tuple(argument for argument in trial.point if not argument.startswith(f"{SEED}=")), []
        ).append(trial)
    sign = 1 if metric_of(results).lower_is_better else -1
    rows = [
        _row(point, {trial: results[trial] for trial in trials}) for point, trials in groups.items()
    ]
    return sorted(
        rows,
        key=lambda row: (
            not math.isfinite(row.mean),
            sign * row.mean if math.isfinite(row.mean) else 0.0,
        ),
    )


def _row(point: Point, results: Results) -> PointSummary:
    done = [
        result
        for result in results.values()
        if result.state == "done" and math.isfinite(result.last)
    ]
    last = [result.last for result in done]
    counts = Counter(result.state for result in results.values())
    states = (
        ", ".join(f"{count} {state}" for state, count in counts.items())
        if len(results) > 1
        else next(iter(counts))
    )
    return PointSummary(
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


def table_lines(rows: Sequence[PointSummary], metric: RunMetric) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    cells = [["", *keys, metric.name, "sd", "n", "best", "epochs", "seconds", "trials", ""]]
    for place, row in enumerate(rows, start=1):
        values = [row.values.get(key, "") for key in keys]
        measured = [
            metric.shown(row.mean),
            metric.shown(row.sd),
            str(row.done),
            metric.shown(row.best),
        ]
        cells.append(
            [
                str(place),
                *values,
                *measured,
                _shown(row.epochs, 2),
                _shown(row.seconds, 1),
                _numbers(row),
                row.states,
            ]
        )
    return align(cells, left=(len(cells[0]) - 1,))


def _shown(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else ""


def _numbers(row: PointSummary) -> str:
    return ",".join(str(trial.number) for trial in row.trials)


def to_json(rows: Sequence[PointSummary], results: Results, metric: RunMetric) -> dict[str, Any]:
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
    found = {
        "arguments": list(trial.point),
        "state": result.state,
        "last": _finite(result.last),
        "best": _finite(result.best),
    }
    found |= {"epochs": _finite(result.epochs), "seconds": _finite(result.seconds)}
    return found | ({"error": result.error} if result.error else {})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


FILE = "sweep.json"
EXITS = "exits.jsonl"
LOCK = ".sweep.lock"
_MOST_BYTES = 2**26
_VERSION = 1
_OPTIONS = {
    "sampler": "--sampler",
    "seed": "--seed",
    "grid": "--grid",
    "random": "--random",
    "ranks_per_trial": "--ranks-per-trial",
    "script": "--",
}


@dataclass
class Sweep:
    """The definition of a sweep; trials are added if they are proposed one by one."""

    sampler: str
    seed: int
    grid: list[str]
    random: list[str]
    ranks_per_trial: int
    config: list[str]  # the lines of the configuration that all trials share, resolved
    trials: list[Point] = field(default_factory=list)
    script: list[str] = field(default_factory=list)  # what all trials run; empty: hvdtrain


@contextmanager
def locked_sweep(folder: Path) -> Iterator[None]:
    """Makes the folder, and holds it for this process. Raises UserError if another one sweeps in
    it, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(
            f"cannot write in {folder}: {error.strerror}",
            "--out",
            "give a folder that can be written",
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another sweep runs in {folder}", "--out", "wait for its end, or another --out"
            ) from None
        except OSError:  # a file system without locks; each run folder also has a lock
            pass
        yield


def write_sweep(folder: Path, sweep: Sweep) -> None:
    text = json.dumps({"version": _VERSION, **asdict(sweep)}, indent=1)
    with Folder.open(folder) as opened:
        opened.replace(FILE, f"{text}\n".encode())


def take_up_sweep(folder: Path, sweep: Sweep, command: str) -> Sweep:
    """Returns the sweep recorded in the folder, extended by further trials of this one, if they are
    the same sweep; else this one.

    Raises UserError if it is another.
    """
    try:
        with Folder.open(folder) as opened:
            found = json.loads(opened.read(FILE, _MOST_BYTES))
    except FileNotFoundError:
        others = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
        if others:
            what = f"{folder} contains other files, but no {FILE}: {short(', '.join(others[:3]))}"
            raise UserError(what, "--out", "an empty folder, or a new one") from None
        return sweep
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder / FILE}: {error}", "--out", "another --out") from None
    former = _former(found, folder)
    _refuse_another(former, sweep, folder, command)
    return sweep if len(sweep.trials) > len(former.trials) else former


def _former(found: Any, folder: Path) -> Sweep:
    try:
        if found.pop("version") != _VERSION:
            raise ValueError("of another version")
        trials = [tuple(map(str, point)) for point in found.pop("trials")]
        return Sweep(**found, trials=trials)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / FILE} is not a record of a sweep: {error}", "--out", "another --out"
        ) from None


def _refuse_another(former: Sweep, sweep: Sweep, folder: Path, command: str) -> None:
    for name, option in _OPTIONS.items():
        before = getattr(former, name)
        now = getattr(sweep, name)
        if before != now:
            raise _another(
                folder, f"{option} {_shown_value(now)}, there it is {_shown_value(before)}", command
            )
    try:
        there = _values(former.config)
        here = _values(sweep.config)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{folder / FILE} is not a record of a sweep: {error}", "--out", "another --out"
        ) from None
    for key in {**there, **here}:
        before, now = (str(values.get(key, "not set")) for values in (there, here))
        if before != now:
            raise _another(
                folder,
                f"their configurations differ: {key} is {short(now)} here, there it is "
                f"{short(before)}",
                command,
            )
    shared = min(len(former.trials), len(sweep.trials))
    if former.trials[:shared] != sweep.trials[:shared]:
        raise _another(folder, "its trials are others", command)


def _values(config: list[str]) -> dict[str, Any]:
    """Returns {"batch.size": 8, ...} from the lines of a configuration."""
    return {
        leaf.key: value_of(leaf.node, as_text=False)
        for leaf in leaves(compose("\n".join(config)), ())
    }


def _shown_value(value: Any) -> str:
    return short(" ".join(map(str, value)) or "(none)") if isinstance(value, list) else str(value)


def _another(folder: Path, difference: str, command: str) -> UserError:
    return UserError(
        f"{folder} contains another sweep: {difference}",
        command,
        "use another --out; or repeat that sweep's command to resume it",
    )


def append_exit(folder: Path, name: str, code: int, state: State, error: str) -> None:
    with Folder.open(folder) as opened, opened.append(EXITS) as file:
        file.write(
            f"{json.dumps({'trial': name, 'code': code, 'state': state, 'error': error})}\n".encode()  # noqa: E501
        )


def read_exits(folder: Path) -> dict[str, tuple[State, str]]:
    """Returns {name of a trial: (its state, its error)} for ended trials; the last line of each
    counts."""
    exits: dict[str, tuple[State, str]] = {}
    with contextlib.suppress(FileNotFoundError), Folder.open(folder) as opened:
        for line in opened.read(EXITS, _MOST_BYTES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a crash
                ended = json.loads(line)
                exits[ended["trial"]] = (ended["state"], str(ended["error"]))
    return exits

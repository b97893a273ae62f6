"""hvdtrain sweep: trains with many settings, each in a separate run folder, and shows which is
best."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from hvdtrain.cli.output import STANDARD_OUTPUT, print_result
from hvdtrain.comm.driver_files import HERE
from hvdtrain.comm.launcher_variables import listed_devices, placement
from hvdtrain.core.early_signals import ECHO_S, STOPPING, EarlySignals
from hvdtrain.core.extras import shows_run
from hvdtrain.core.folder import Folder
from hvdtrain.core.process import command_line, path_argument, start_child
from hvdtrain.errors import BUG, DIVERGED, DONE, REQUEUE, UserError
from hvdtrain.extras.launch.mpirun import available_cores
from hvdtrain.extras.sweep.arguments import USAGE, SweepOptions, read_options, split_script
from hvdtrain.extras.sweep.figure import SweepPoint, draw_sweep
from hvdtrain.extras.sweep.optuna_study import OptunaStudy
from hvdtrain.extras.sweep.space import Point
from hvdtrain.extras.sweep.trials import (
    KEPT,
    PointSummary,
    Result,
    State,
    Sweep,
    Trial,
    append_exit,
    end_of_script,
    error_line,
    locked_sweep,
    metric_of,
    read_exits,
    read_result,
    rows_of,
    state_of,
    table_lines,
    take_up_sweep,
    to_json,
    write_sweep,
)
from hvdtrain.records.run import RunMetric

TABLE = "sweep.txt"
PICTURE = "sweep.png"


def sweep(arguments: Sequence[str]) -> int:
    """Runs `sweep`; returns the exit code, as USAGE says. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(split_script(arguments)[0]):
        print(USAGE)
        return DONE
    current = placement(os.environ)
    if current.size > 1:
        what = f"this is rank {current.rank} of {current.size}, started by {current.launcher}"
        raise UserError(
            what,
            "command line of sweep",
            "sweep without a launcher: --ranks-per-trial 4 starts ranks",
        )
    options, planned = read_options(arguments)
    command = command_line("sweep", *arguments)
    with locked_sweep(options.out):
        planned = take_up_sweep(options.out, planned, f"--out {options.out}")
        write_sweep(options.out, planned)
        job = _Job(options, planned)
        job.run()
        return job.finish(command)


class _Job:
    """One start of a sweep."""

    def __init__(self, options: SweepOptions, planned: Sweep) -> None:
        self._options = options
        self._planned = planned
        self._began_s = time.monotonic()
        self._exits = read_exits(options.out)
        self._results = {trial: self._result(trial) for trial in self._trials()}
        self._kept = sum(result.state in KEPT for result in self._results.values())
        self._ended = 0  # in this start
        self._total = max(
            len(planned.trials), (options.trials or 0) if options.sampler == "optuna" else 0
        )
        self._beside = SideBySide(
            options.at_once, self._command, lambda trial: self._folder(trial).with_suffix(".log")
        )

    def run(self) -> None:
        _say(
            f"sweep       {self._options.out}: {self._total} trials, {self._kept} kept from "
            f"before, {self._options.at_once} at once"
        )
        proposals = self._proposals()

        def following() -> Trial | None:
            trial = proposals.following()
            if trial is not None:
                _say(
                    f"{trial.name}  {'resumes' if self._folder(trial).exists() else 'starts'}: "
                    f"{' '.join(trial.point)}"
                )
            return trial

        def ended(trial: Trial, code: int, was_hopeless: bool) -> None:
            self._note(trial, code, was_hopeless)
            proposals.ended(trial, self._results[trial])

        self._beside.run(following, ended, self._environment, proposals.is_hopeless)

    def finish(self, command: str) -> int:
        """Prints and writes the results so far; returns the exit code."""
        options = self._options
        metric = metric_of(self._results)
        rows = rows_of(self._results)
        lines = [*table_lines(rows, metric), *self._failures(), *self._without_objective(metric)]
        _write(options.out, "\n".join(lines) + "\n")
        picture = self._draw(rows)
        footer = (
            [f"table       {options.out / TABLE}", picture]
            if picture
            else [f"table       {options.out / TABLE}"]
        )
        if rows and rows[0].done:
            footer.append(f"best        {options.command_to_type(rows[0].point)}")
            best = [
                path_argument(options.out / trial.name)
                for trial in rows[0].trials
                if self._results[trial].state == "done"
            ]
            footer += [f"{name:11} {command_line(name, *best)}" for name in shows_run()]
        states: list[State] = [result.state for result in self._results.values()]
        missing = self._total - sum(state in KEPT or state == "failed" for state in states)
        if missing:
            footer.append(
                f"stopped: {missing} of {self._total} trials are not done; the same command "
                f"resumes: {command}"
            )
        print_result(
            options.json,
            [*lines, *footer],
            {"out": str(options.out), **to_json(rows, self._results, metric)},
        )
        if options.json == STANDARD_OUTPUT and missing:
            _say(footer[-1])
        return exit_code(states, missing)

    def _trials(self) -> list[Trial]:
        return [Trial(number, point) for number, point in enumerate(self._planned.trials, start=1)]

    def _folder(self, trial: Trial) -> Path:
        return self._options.out / trial.name

    def _result(self, trial: Trial) -> Result:
        """Returns the current result of a trial; "waiting" if it still runs or never ended."""
        state, error = self._exits.get(trial.name, ("waiting", ""))
        return read_result(self._folder(trial), state, error)

    def _proposals(self) -> Proposals:
        if self._options.sampler != "optuna":
            kept = {trial.name for trial, result in self._results.items() if result.state in KEPT}
            return Listed(self._trials(), kept)
        points = self._planned.trials
        return OptunaStudy(
            self._options.space,
            self._options.seed,
            self._total,
            list(points),
            self._result,
            self._add,
        )

    def _add(self, point: Point) -> None:
        self._planned.trials.append(point)
        write_sweep(self._options.out, self._planned)
        trial = self._trials()[-1]
        self._results[trial] = self._result(trial)

    def _command(self, trial: Trial) -> list[str]:
        return self._options.trial_command([*trial.point, f"run={self._folder(trial)}"])

    def _environment(self, slot: int) -> Mapping[str, str]:
        return {
            **os.environ,
            **shares(os.environ, slot, self._options.at_once, self._options.ranks),
        }

    def _note(self, trial: Trial, code: int, was_hopeless: bool) -> None:
        """A trial that ended."""
        folder = self._folder(trial)
        error = ""
        if self._options.script is not None:
            code, error = end_of_script(folder, code)
        state = state_of(code, was_hopeless)
        if (
            state == "failed" and self._beside.is_stopped and code > 128
        ):  # killed by the second signal
            state = "stopped"
        if state in ("failed", "diverged"):
            error = error or error_line(folder.with_suffix(".log"))
        append_exit(self._options.out, trial.name, code, state, error)
        self._exits[trial.name] = (state, error)
        self._results[trial] = result = self._result(trial)
        self._ended += 1
        value = (
            f", {result.metric.name} {result.metric.shown(result.last)}"
            if math.isfinite(result.last)
            else ""
        )
        left = self._total - self._kept - self._ended
        passed_s = time.monotonic() - self._began_s
        more = (
            f", about {_time(passed_s / self._ended * left)} left"
            if left and not self._beside.is_stopped
            else ""
        )
        because = f": {error}" if error else ""
        _say(
            f"{trial.name}  {state}{value}{because} ({self._kept + self._ended} of "
            f"{self._total}{more})"
        )

    def _failures(self) -> list[str]:
        return [
            f"{trial.name} {result.state}: {result.error}; "
            f"{self._folder(trial).with_suffix('.log')}"
            for trial, result in self._results.items()
            if result.error
        ]

    def _without_objective(self, metric: RunMetric) -> list[str]:
        """A line if no trial that is done has a value of the objective, by which the table is
        sorted."""
        done = [result for result in self._results.values() if result.state == "done"]
        if not done or any(math.isfinite(result.last) for result in done):
            return []
        return [
            f"no trial has a validation {metric.name}: a custom loop logs it with "
            f"ctx.log(val_{metric.name}=...)"
        ]

    def _draw(self, rows: Sequence[PointSummary]) -> str:
        """Returns a line for people; empty if there is nothing to draw."""
        points = [SweepPoint(row.values, row.mean, row.sd) for row in rows if row.done]
        if not points:
            return ""
        title = f"{self._options.out.name}: {sum(row.done for row in rows)} trials"
        return draw_sweep(
            self._options.out / PICTURE, title, metric_of(self._results), points
        ).replace("picture: ", "figure      ")


def exit_code(states: Collection[State], missing: int) -> int:
    """Returns the exit code of a sweep with these states of trials; `missing`: how many did not
    end."""
    if missing:
        return REQUEUE
    if "done" in states:
        return DONE
    return BUG if "failed" in states else DIVERGED


def shares(environ: Mapping[str, str], slot: int, at_once: int, ranks: int) -> dict[str, str]:
    """Returns variables for a trial that runs beside others: its share of the cores, and separate
    GPUs if there are enough."""
    if at_once == 1:
        return {}
    variables = (
        {}
        if environ.get("OMP_NUM_THREADS")
        else {"OMP_NUM_THREADS": str(max(1, available_cores() // (at_once * ranks)))}
    )
    gpus = HERE.visible_nvidia(environ)
    if gpus >= at_once * ranks:
        names = listed_devices(environ) or [str(number) for number in range(gpus)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot * ranks : (slot + 1) * ranks])
    return variables


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _write(folder: Path, text: str) -> None:
    try:
        with Folder.open(folder) as opened:
            opened.replace(TABLE, text.encode())
    except OSError as error:
        raise UserError(
            f"cannot write {folder / TABLE}: {error.strerror}",
            "--out",
            "make room, and give the same command again",
        ) from None


def _say(line: str) -> None:
    """Prints progress."""
    print(line, file=sys.stderr, flush=True)


class Proposals(Protocol):
    """Proposes the trials of a sweep, which calls these methods while its processes run."""

    def following(self) -> Trial | None:
        """Returns the next trial to start, including interrupted ones; None if there is none
        left."""

    def ended(self, trial: Trial, result: Result) -> None:
        """Called when a trial from `following` has ended."""

    @property
    def is_hopeless(self) -> Callable[[Trial], bool] | None:
        """Whether a running trial should be stopped because of its results so far; None: never."""


class Listed:
    """Trials in order, without completed ones that are kept."""

    is_hopeless = None

    def __init__(self, trials: Sequence[Trial], kept: Collection[str]) -> None:
        self._left = [trial for trial in trials if trial.name not in kept]

    def following(self) -> Trial | None:
        return self._left.pop(0) if self._left else None

    def ended(self, trial: Trial, result: Result) -> None:
        """Does nothing."""


_POLL_S = 0.05
_LOOK_S = 1.0


@dataclass
class _Running:
    trial: Trial
    child: subprocess.Popen[bytes]
    is_asked: bool = False  # to stop
    is_hopeless: bool = False  # the reason for that


class SideBySide:
    """Runs trials until none are left, at most at_once at a time."""

    def __init__(
        self, at_once: int, command: Callable[[Trial], Sequence[str]], log: Callable[[Trial], Path]
    ) -> None:
        self._at_once = at_once
        self._command = command
        self._log = log
        self._running: dict[int, _Running] = {}  # by slot: 0 to at_once - 1
        self._stopped_s: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal came."""
        return self._stopped_s is not None

    def run(
        self,
        following: Callable[[], Trial | None],
        ended: Callable[[Trial, int, bool], None],
        environment: Callable[[int], Mapping[str, str]],
        is_hopeless: Callable[[Trial], bool] | None = None,
    ) -> None:
        """Runs all trials from `following` until they have ended.

        ended: called with the exit code of each, and whether it was stopped as hopeless.
        environment: returns the variables of a slot. is_hopeless: called each second for running
        trials.
        """
        former = {number: signal.getsignal(number) for number in STOPPING}
        try:
            for number, handler in former.items():
                if (
                    handler is not signal.SIG_IGN
                ):  # the parent process set it so, as nohup does with SIGHUP
                    signal.signal(number, self._stop)
                if isinstance(handler, EarlySignals) and handler.received:
                    self._stopped_s = time.monotonic()
            looked_s = time.monotonic()
            while self._start(following, environment):
                time.sleep(_POLL_S)
                self._reap(ended)
                if is_hopeless is not None and time.monotonic() - looked_s > _LOOK_S:
                    looked_s = time.monotonic()
                    self._stop_hopeless(is_hopeless)
        finally:
            self._send(signal.SIGTERM)  # if an error of hvdtrain ends the loop
            for number, handler in former.items():
                signal.signal(number, handler)

    def _start(
        self, following: Callable[[], Trial | None], environment: Callable[[int], Mapping[str, str]]
    ) -> bool:
        """Fills the free slots; returns whether anything runs."""
        for slot in range(self._at_once):
            if slot in self._running or self.is_stopped or (trial := following()) is None:
                continue
            with self._log(trial).open(
                "ab"
            ) as log:  # a separate session, so that no signal of the terminal reaches it
                child = start_child(
                    self._command(trial),
                    environment(slot),
                    signal.SIGTERM,
                    new_session=True,
                    output=log,
                )
            self._running[slot] = _Running(trial, child)
            if self.is_stopped:  # meanwhile
                self._ask(self._running[slot])
        return bool(self._running)

    def _reap(self, ended: Callable[[Trial, int, bool], None]) -> None:
        for slot, one in list(self._running.items()):
            status = one.child.poll()
            if status is not None:
                del self._running[slot]
                code = status if status >= 0 else 128 - status
                # its Python was not running yet
                was_starting = code == 128 + signal.SIGUSR2 and (self.is_stopped or one.is_asked)
                ended(one.trial, REQUEUE if was_starting else code, one.is_hopeless)

    def _stop_hopeless(self, is_hopeless: Callable[[Trial], bool]) -> None:
        for one in self._running.values():
            if not one.is_asked and is_hopeless(one.trial):
                one.is_hopeless = True
                self._ask(one)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
            for one in list(self._running.values()):
                self._ask(one)
            os.write(
                2, b"hvdtrain sweep: stopping all trials with a checkpoint; again to kill them\n"
            )
        elif time.monotonic() - self._stopped_s > ECHO_S:
            self._send(signal.SIGKILL)

    @staticmethod
    def _ask(one: _Running) -> None:
        """Asks a trial to stop with a checkpoint. Only once, because a second request would kill
        it."""
        if not one.is_asked:
            one.is_asked = True
            one.child.send_signal(signal.SIGUSR2)

    def _send(self, number: int) -> None:
        for one in list(self._running.values()):
            one.child.send_signal(number)  # does nothing if it has ended

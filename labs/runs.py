"""The training jobs of a lab: on many ranks, or side by side in one process each.

A job that its run folder says is over is not trained again, one that was interrupted goes on: so
the same command continues a lab.
"""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import hvdtrain
from hvdtrain.core.ends_with_parent import end_with_parent
from hvdtrain.errors import DIVERGED, REQUEUE, UserError
from hvdtrain.extras.lab.command import start_process, wait_for
from hvdtrain.extras.launch.mpirun import available_cores

ANOTHER = "another --out begins anew"
# the most of a log that an error shows
_LOG_LINES = 12
_LOG_BYTES = 4000


class Job(NamedTuple):
    """What to train; what the job prints goes into the run folder's name with .log."""

    run: Path
    words: Sequence[str]  # key=value
    config: str | None = None  # a YAML file

    @property
    def log(self) -> Path:
        return self.run.with_name(f"{self.run.name}.log")


def train(job: Job) -> Any:
    """Trains in this process; returns the table of hvdtrain.read(), or None where the job
    diverges."""
    if _diverged(job.run):
        return None
    with job.log.open("a") as log, contextlib.redirect_stdout(log):
        try:
            run = hvdtrain.train(job.config, *job.words, f"run={job.run}")
        except UserError as error:
            if error.code != DIVERGED:
                is_other = (
                    job.run / "config.yaml"
                ).exists()  # of another lab.py, where it cannot go on
                raise UserError(
                    error.what, error.where, f"{error.fix}; {ANOTHER}" if is_other else error.fix
                ) from None
            print(error)
            return None
    if run.code == REQUEUE:  # Ctrl-C, after a checkpoint
        raise KeyboardInterrupt
    return hvdtrain.read(run)


def side_by_side(function: Any, arguments: Sequence[Any], at_once: int = 2) -> list[Any]:
    """function(argument) of each, in order; the function is one that another process can import.
    The processes share the cores."""
    threads = str(max(1, available_cores() // at_once))
    context = multiprocessing.get_context("spawn")
    with (
        _environment(OMP_NUM_THREADS=threads),
        ProcessPoolExecutor(
            at_once, context, initializer=end_with_parent, initargs=(os.getpid(), signal.SIGKILL)
        ) as pool,
    ):
        try:
            with _interrupts_later():
                futures = [pool.submit(function, argument) for argument in arguments]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()  # a checkpoint is whole or not there
            raise
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C in this block counts at its end; the processes that are started in it stay deaf to it:
    it is this one that ends them."""
    seen: list[int] = []
    # where a thread of a library takes it
    former = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, former)
        if seen:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _environment(**defaults: str) -> Iterator[None]:
    """Variables for the processes that are started meanwhile; those that are set already stay as
    they are."""
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def launch(job: Job, ranks: int, *options: str, **variables: str) -> Any:
    """`hvdtrain launch -np RANKS OPTIONS -- JOB`, with these environment variables; returns the
    table of hvdtrain.read(). Raises UserError where the job fails."""
    config = ["--config", job.config] if job.config else []
    words = [
        "launch",
        "-np",
        str(ranks),
        *(options or ["--oversubscribe"]),
        "--",
        *config,
        *job.words,
        f"run={job.run}",
    ]
    start(
        [[sys.executable, "-m", "hvdtrain", *words]],
        job.log,
        f"the job on {ranks} rank{'s' * (ranks > 1)}",
        **variables,
    )
    return hvdtrain.read(job.run)


def start(commands: Sequence[Sequence[str]], log: Path, what: str, **variables: str) -> None:
    """Starts all at once and waits for them; they print into the log. Raises UserError with its end
    where one of them fails."""
    with log.open("ab") as file:
        began = file.tell()
        codes = wait_for(
            [start_process(command, file, {**os.environ, **variables}) for command in commands]
        )
    if any(codes):
        shown = "".join(f"\n  | {line}" for line in _end_of(log, began)) or " nothing"
        code = ", ".join(map(str, codes))
        raise UserError(
            f"{what} ended with code {code}; its log ends with{shown}",
            str(log),
            f"see the log; {ANOTHER}",
        )


def _end_of(log: Path, began: int) -> list[str]:
    """The last lines that were written after so many bytes."""
    with log.open("rb") as file:
        file.seek(max(began, log.stat().st_size - _LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-_LOG_LINES:]


def event(run: Path, kind: str) -> dict[str, Any]:
    """The newest event of a kind (docs/events.md), of those that hvdtrain.read() leaves out: start,
    end, ..."""
    return next(event for event in reversed(_events(run)) if event["kind"] == kind)


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """All events of a kind, in order."""
    return [event for event in _events(run) if event["kind"] == kind]


def _diverged(run: Path) -> bool:
    return (run / "events.jsonl").exists() and _events(run)[-1].get("exit_code") == DIVERGED


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def write_table(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])

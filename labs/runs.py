"""The training jobs of a lab: on many ranks, or side by side in one process each.

A job that its run folder says is over is not trained again, one that was interrupted goes on: so the same command continues a lab.
"""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import hvdtrain
from hvdtrain.cli.launch.machine import available_cores
from hvdtrain.errors import DIVERGED, UserError


class Job(NamedTuple):
    """What to train; what the job prints goes into the run folder's name with .log."""

    run: Path
    words: Sequence[str]  # key=value
    config: str | None = None  # a YAML file

    @property
    def log(self) -> Path:
        return self.run.with_name(f"{self.run.name}.log")


def train(job: Job) -> Any:
    """Trains in this process; returns the table of hvdtrain.read(), or None where the job diverges."""
    if _diverged(job.run):
        return None
    with job.log.open("a") as log, contextlib.redirect_stdout(log):
        try:
            return hvdtrain.read(hvdtrain.train(job.config, *job.words, f"run={job.run}"))
        except UserError as error:
            if error.code != DIVERGED:
                raise
            print(error)
            return None


def side_by_side(function: Any, arguments: Sequence[Any], at_once: int = 2) -> list[Any]:
    """function(argument) of each, in order; the function is one that another process can import. The processes share the cores."""
    threads = str(max(1, available_cores() // at_once))
    with _environment(OMP_NUM_THREADS=threads), ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, arguments))


@contextlib.contextmanager
def _environment(**defaults: str) -> Iterator[None]:
    """Variables for the processes that are started meanwhile; those that are set already stay as they are."""
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def launch(job: Job, ranks: int, *options: str) -> Any:
    """`hvdtrain launch -np RANKS OPTIONS -- JOB`; returns the table of hvdtrain.read()."""
    config = ["--config", job.config] if job.config else []
    words = ["launch", "-np", str(ranks), *(options or ["--oversubscribe"]), "--", *config, *job.words, f"run={job.run}"]
    with job.log.open("a") as log:
        done = subprocess.run([sys.executable, "-m", "hvdtrain", *words], stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"the job on {ranks} ranks ended with code {done.returncode}: {job.log}")
    return hvdtrain.read(job.run)


def event(run: Path, kind: str) -> dict[str, Any]:
    """The newest event of a kind (docs/events.md), of those that hvdtrain.read() leaves out: start, end, ..."""
    return next(event for event in reversed(_events(run)) if event["kind"] == kind)


def _diverged(run: Path) -> bool:
    return (run / "events.jsonl").exists() and _events(run)[-1].get("exit_code") == DIVERGED


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def write_table(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])

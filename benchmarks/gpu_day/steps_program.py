"""Steps of several jobs in one start: their losses, the milliseconds of a step, and where the host
waited for its GPU.

python benchmarks/gpu_day/steps_program.py JOBS.json OUT.json     {"job": "key=value key=value ..."}

All jobs have the engine of the first one. Rank 0 writes {"job": {...}}.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.events.log import Event, Log
from hvdtrain.training.build import build_learner, connect
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.loop import record, run_steps, synchronize
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.start import begin

WARM_UP = 2  # windows of log.every_steps, in which torch and hvdtrain allocate what they keep


def main(jobs_file: str, out: str) -> None:
    jobs: dict[str, str] = json.loads(Path(jobs_file).read_text())
    first = configure(None, next(iter(jobs.values())).split())
    communicator, _ = connect(first, placement(os.environ))
    found = {name: steps(words.split(), communicator) for name, words in jobs.items()}
    if communicator.rank == 0:
        Path(out).write_text(json.dumps(found))
    communicator.close()


def steps(words: list[str], communicator: Communicator) -> dict[str, Any]:
    """Steps without an evaluation or a checkpoint. On one rank an operation that makes the host
    wait between sync points ends them, and is returned."""
    config = configure(None, words)
    datasets = open_datasets(config, communicator)
    learner = build_learner(config, datasets.task, communicator)
    broadcast_state(communicator, learner, None)
    losses: list[float] = []

    def note(event: Event) -> None:
        if event.kind == "step":
            losses.append(event.fields["loss"])

    now = begin(config, datasets)
    job = make_job(
        config,
        datasets,
        communicator,
        learner,
        signals=Signals(0),
        heartbeat=Heartbeat(),
        log=Log([note]),
        start=now,
        run=None,
    )
    seconds: list[float] = []  # of a step, in each window
    waited = ""
    windows = 0
    while now.progress.step < config.stop.steps and not waited:
        began_s = time.perf_counter()
        before = now.progress.step
        try:
            with no_waits(is_on=windows >= WARM_UP and communicator.size == 1):
                window = run_steps(job, now)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            waited = f"{error}: {at_of(error)}"
            break
        sums = synchronize(job, window)
        job.unfinished = None
        now = record(job, now, window, sums, time.perf_counter() - began_s)
        windows += 1
        if windows > WARM_UP:
            seconds.append((time.perf_counter() - began_s) / (now.progress.step - before))
    return {
        "losses": losses,
        "ms_per_step": 1e3 * statistics.median(seconds) if seconds else None,
        "samples_per_s": config.batch.size / statistics.median(seconds) if seconds else None,
        "waited": waited,
        "on": str(learner.device),
    }


@contextmanager
def no_waits(*, is_on: bool) -> Iterator[None]:
    """Inside, an operation that makes the host wait for its GPU raises RuntimeError."""
    if not (is_on and torch.cuda.is_available()):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def at_of(error: BaseException) -> str:
    """ "frameworks/torch/step.py:57", of the innermost frame of hvdtrain."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "hvdtrain" in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


if __name__ == "__main__":
    main(*sys.argv[1:])

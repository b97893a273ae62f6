"""Shared parts of the benches: running work on all ranks, a job that trains in blocks of steps, and
statistics of timings."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.plugins import check_names
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE
from hvdtrain.events.log import Log
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.build import build_learner, connect
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.datasets import Datasets, open_datasets, with_blocks
from hvdtrain.training.failure import end_every_rank
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.job_memory import resolve_micro
from hvdtrain.training.loop import train_to_sync_point
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.start import begin


class Trainer:
    """A job without an end; each rank has one."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        signals: Signals,
        datasets: Datasets | None = None,
    ) -> None:
        config = resolve_batch_size(config, communicator.size)
        refuse_conflicts(config, communicator.name, communicator.size)
        endless = config.replace(
            epochs=10**6,
            stop=config.stop.replace(steps=None, time=None),
            guard=config.guard.replace(max_time=None),
        )
        self.datasets = datasets or open_datasets(endless, communicator)
        endless = resolve_micro(
            with_blocks(endless, self.datasets.train), self.datasets, communicator
        )
        learner = build_learner(endless, self.datasets.task, communicator)
        broadcast_state(communicator, learner, None)
        self.now = begin(endless, self.datasets)
        self.job = make_job(
            endless,
            self.datasets,
            communicator,
            learner,
            signals=signals,
            heartbeat=Heartbeat(),
            log=Log([]),
            start=self.now,
            run=None,
        )
        self.prefetcher = self.job.prefetcher

    def block(self, steps: int) -> float:
        """Returns the seconds of this number of steps, a multiple of log.every_steps; waits for a
        pending checkpoint."""
        job = self.job
        last_step = self.now.progress.step + steps
        job.communicator.allreduce(np.zeros(1), "begin")  # all ranks begin together
        began_s = time.perf_counter()
        while self.now.progress.step < last_step:
            self.now = train_to_sync_point(job, self.now)
            # as if it had been evaluated
            self.now = dataclasses.replace(self.now, epoch=self.now.progress.epoch)
            if job.memory_copy:
                job.memory_copy.keep(self.now)
            job.checkpoints.save_if_due(self.now)
        job.checkpoints.close()
        job.communicator.allreduce(np.zeros(1), "end")
        assert self.now.progress.step == last_step, (self.now.progress.step, last_step)
        return time.perf_counter() - began_s


def run_on_ranks(config: Config, work: Callable[[Communicator, str], None]) -> int:
    """Calls work(communicator, why this engine was chosen) on every rank; returns the exit code."""
    check_names(config)
    communicator, engine_reason = connect(config, placement(os.environ))
    try:
        work(communicator, engine_reason)
        communicator.close()
        return DONE
    except BaseException as error:  # SystemExit too
        return end_every_rank(error, communicator, "bench")


class Quartiles(NamedTuple):
    low: float  # a quarter of the values is below
    median: float
    high: float  # a quarter of the values is above


def quartiles(values: Sequence[float]) -> Quartiles:
    """Returns the interpolated quartiles, within the range of the values; for one value three times
    that value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def median_speedup(seconds: Sequence[float], other_seconds: Sequence[float]) -> float:
    """Returns the median over rounds of other_seconds / seconds."""
    return statistics.median(
        other / ours for ours, other in zip(seconds, other_seconds, strict=True)
    )

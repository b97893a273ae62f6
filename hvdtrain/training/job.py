"""The objects of one rank of a job, and how they are made."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Progress
from hvdtrain.data.source import Source
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe import from_config
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.training.build import build_recipe
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.datasets import Datasets, identity
from hvdtrain.training.health.deadline import Deadline
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.input.prefetch import Prefetcher
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.telemetry.telemetry import Telemetry, make_telemetry


@dataclass
class Job:
    """Everything that the training loop uses."""

    config: Config
    communicator: Communicator
    hosts: list[str]  # of each rank
    learner: Learner
    recipe: Recipe
    prefetcher: Prefetcher  # of the training samples
    val: Source
    log: Log
    heartbeat: Heartbeat
    checkpoints: Checkpoints
    health: HealthMonitor
    telemetry: Telemetry
    noise_scale: NoiseScale
    clock: Callable[[], float]  # seconds spent in this job, over all its runs


def make_job(
    config: Config,
    datasets: Datasets,
    communicator: Communicator,
    learner: Learner,
    *,
    signals: Signals,
    heartbeat: Heartbeat,
    log: Log,
    start: TrainState,
    run: Path | None,
    checkpoint_limit_bytes: int = 0,
) -> Job:
    """The job that continues from `start`. Every rank calls it, with its learner in the common state.

    run: the run folder, where rank 0 writes checkpoints; None for a job that writes nothing. checkpoint_limit_bytes: files of a
    checkpoint that are larger are not read.
    """
    hosts = communicator.allgather_object(socket.gethostname())
    deadline = saver = None
    if communicator.rank == 0:
        deadline = Deadline(config.guard.max_time, os.environ, heartbeat.started_s, time.time(), time.monotonic)
        if run is not None:
            saver = Saver(run, config.checkpoint, identity(config, datasets), log, size_bytes=checkpoint_limit_bytes // 8)
            saver.resume_from(start)
    recipe = build_recipe(config, len(datasets.train))
    prefetcher = Prefetcher(config, communicator, recipe, datasets.train, learner)
    checkpoints = Checkpoints(communicator, learner, run or Path(), checkpoint_limit_bytes, saver)
    return Job(
        config=config,
        communicator=communicator,
        hosts=hosts,
        learner=learner,
        recipe=recipe,
        prefetcher=prefetcher,
        val=datasets.val,
        log=log,
        heartbeat=heartbeat,
        checkpoints=checkpoints,
        health=HealthMonitor(config.guard, communicator, signals, heartbeat, hosts, checkpoints, deadline),
        telemetry=make_telemetry(config, communicator, learner, hosts, log, run or Path()),
        noise_scale=NoiseScale(signal=start.noise[0], noise=start.noise[1]),
        clock=_clock(start.seconds),
    )


def begin(config: Config, datasets: Datasets) -> TrainState:
    """The state of a new job."""
    samples = len(datasets.train)
    return TrainState(Progress(samples, samples * from_config.total_epochs(config)))


def _clock(before_s: float) -> Callable[[], float]:
    """A clock that begins now, at before_s: the seconds of the runs before this one."""
    began_s = time.perf_counter()
    return lambda: before_s + time.perf_counter() - began_s

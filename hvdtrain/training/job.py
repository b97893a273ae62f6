"""The objects of one rank of a job, and how they are created."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementing_module
from hvdtrain.core.folder import Folder
from hvdtrain.core.metrics import Sums
from hvdtrain.data.configured.split import evaluated_part
from hvdtrain.data.source import Source
from hvdtrain.events.log import Log
from hvdtrain.events.rank_log import RankWarnings
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.task import Task
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.checkpoint.files import Identity, OpenFolder
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.data_facts import identity
from hvdtrain.training.datasets import Datasets, recipe_of
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import Deadline, HealthMonitor
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.hooks import Hook, Hooks, Training
from hvdtrain.training.input import Prefetcher
from hvdtrain.training.job_memory import MemoryMeter
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.probe import Probe
from hvdtrain.training.samples import SampleSeries
from hvdtrain.training.telemetry.telemetry import Telemetry, make_gauges, make_telemetry
from hvdtrain.training.telemetry.throughput import Throughput


class StateCopy(Protocol):
    """A copy of the state at a sync point, with guard.lost."""

    def confirm(self) -> None:
        """Called before keep(). Fails if a rank died in earlier collectives. A collective."""

    def keep(self, now: TrainState) -> None:
        """Copies the state at a sync point. A collective if the state is sharded."""


class StepsSinceSync(NamedTuple):
    """The steps of this rank since the last sync point."""

    began_s: float  # time of time.perf_counter()
    sums: Sums


@dataclass
class Job:
    """Everything that the training loop uses."""

    config: Config
    communicator: Communicator
    hosts: list[str]  # of each rank
    task: Task
    learner: Learner
    recipe: Recipe
    prefetcher: Prefetcher  # of the training samples
    val: Source  # the samples of an evaluation
    val_samples: int  # samples in the validation set
    log: Log
    heartbeat: Heartbeat
    warnings: RankWarnings
    checkpoints: Checkpoints
    health: HealthMonitor
    telemetry: Telemetry
    samples: SampleSeries
    hooks: Hooks
    noise: Any  # the NoiseScale of an extra; None without log.noise_scale
    memory: MemoryMeter | None  # None for a job that writes nothing
    # the state to return to when ranks are lost; None if a loss ends the job
    memory_copy: StateCopy | None
    clock: Callable[[], float]  # seconds spent in this job, over all its runs
    throughput: Throughput  # converts its rates to rates per device
    unfinished: StepsSinceSync | None = None  # between two sync points


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
    record_config: Callable[[], None] | None = None,
    open_run: OpenFolder = Folder.open,
    warnings: RankWarnings | None = None,
    memory: MemoryMeter | None = None,
    recipe: Recipe | None = None,
    hooks: Sequence[Hook] = (),
    throughput: Throughput | None = None,
) -> Job:
    """Creates the job that continues from `start`. Every rank calls it, with its learner in the
    common state.

    run: the run folder, where rank 0 writes checkpoints; None for a job that writes nothing.
    checkpoint_limit_bytes: larger checkpoint files are rejected. record_config, open_run: see
    Saver. recipe: if already computed. throughput: of the model and its devices, if measured.
    """
    hosts = communicator.allgather_object(socket.gethostname())
    saver = None
    if communicator.rank == 0 and run is not None:
        saver = make_saver(
            config,
            identity(config, datasets),
            log,
            start,
            run,
            checkpoint_limit_bytes,
            record_config,
            open_run,
        )
    checkpoints = Checkpoints(
        communicator, learner, run or Path(), checkpoint_limit_bytes, saver, hosts, heartbeat.go_on
    )
    health = make_health(
        config, communicator, signals, heartbeat, checkpoints, hosts, Probe(config, datasets.task)
    )
    gauges = make_gauges(config, communicator, learner, log, run, start.progress.step)
    recipe = recipe or recipe_of(config, datasets)
    prefetcher = Prefetcher(config, communicator, recipe, datasets.train, learner, datasets.draws)
    return Job(
        config=config,
        communicator=communicator,
        hosts=hosts,
        task=datasets.task,
        learner=learner,
        recipe=recipe,
        prefetcher=prefetcher,
        val=evaluated_part(config, datasets.val),
        val_samples=len(datasets.val),
        log=log,
        heartbeat=heartbeat,
        warnings=warnings or RankWarnings(),
        checkpoints=checkpoints,
        health=health,
        telemetry=make_telemetry(config, communicator, learner, hosts, log, gauges),
        samples=SampleSeries(
            config,
            datasets.task,
            datasets.val,
            communicator,
            learner,
            heartbeat,
            health,
            log,
            run=run,
            open_run=open_run,
        ),
        hooks=Hooks(
            hooks, Training(config, communicator, learner, run, datasets.task), communicator
        ),
        noise=noise_scale_of(config, start),
        memory=memory,
        memory_copy=None,
        clock=clock_from(start.seconds),
        throughput=throughput or Throughput(),
    )


def noise_scale_of(config: Config, now: TrainState) -> Any:
    """Returns what smooths the measured noise scale, from its sums in a state; None without
    log.noise_scale."""
    if not config.log.measures_noise:
        return None
    signal, noise = now.noise
    return implementing_module("log.noise_scale").NoiseScale(signal=signal, noise=noise)


def make_health(
    config: Config,
    communicator: Communicator,
    signals: Signals,
    heartbeat: Heartbeat,
    checkpoints: Checkpoints,
    hosts: list[str],
    probe: Probe | None = None,
) -> HealthMonitor:
    """Creates the monitor that can stop the trainer's loop, or a custom loop, early."""
    deadline = deadline_of(config, heartbeat) if communicator.rank == 0 else None
    return HealthMonitor(
        config.guard, communicator, signals, heartbeat, hosts, checkpoints, deadline, probe
    )


def make_saver(
    config: Config,
    identity: Identity,
    log: Log,
    now: TrainState,
    run: Path,
    limit_bytes: int,
    record_config: Callable[[], None] | None,
    open_run: OpenFolder,
) -> Saver:
    """Creates the checkpoint writer of a loop that continues from `now`. limit_bytes,
    record_config, open_run: see Saver."""
    kept = config.checkpoint
    if config.stop.restore_best:
        kept = kept.replace(keep_best=max(1, kept.keep_best))
    saver = Saver(
        run,
        kept,
        identity,
        log,
        limit_bytes=limit_bytes,
        record_config=record_config,
        open_run=open_run,
        mtbf_hours=config.guard.mtbf_hours,
    )
    saver.resume_from(now)
    return saver


def on_other_ranks(job: Job, now: TrainState) -> Job:
    """Returns the job that continues from `now` after the communicator's ranks have changed. Every
    rank calls it.

    Readers, the log and the checkpoint writer are kept.
    """
    hosts = job.communicator.allgather_object(socket.gethostname())
    deadline = job.health.deadline
    if deadline is None and job.communicator.rank == 0:
        deadline = deadline_of(job.config, job.heartbeat)
    checkpoints = job.checkpoints.on_other_ranks(hosts)
    health = replace(
        job.health, hosts=hosts, checkpoints=checkpoints, deadline=deadline, updated_s=None
    )
    gauges = [gauge.from_step(now.progress.step) for gauge in job.telemetry.gauges]
    telemetry = make_telemetry(job.config, job.communicator, job.learner, hosts, job.log, gauges)
    return replace(
        job,
        hosts=hosts,
        checkpoints=checkpoints,
        health=health,
        telemetry=telemetry,
        throughput=job.throughput.on_other_ranks(job.config, job.communicator, job.learner),
        samples=replace(job.samples, health=health),
        noise=noise_scale_of(job.config, now),
    )


def deadline_of(config: Config, heartbeat: Heartbeat) -> Deadline:
    """Returns the time at which this job has to stop, from guard.max_time and the batch system; for
    rank 0."""
    return Deadline(
        config.guard.max_time, os.environ, heartbeat.started_s, time.time(), time.monotonic
    )


def clock_from(before_s: float) -> Callable[[], float]:
    """Returns a clock that starts now at before_s, the seconds of earlier runs."""
    began_s = time.perf_counter()
    return lambda: before_s + time.perf_counter() - began_s

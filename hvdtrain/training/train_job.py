"""Runs one job from its data sets to its last line: every rank starts from the same state, trains,
and ends in the same way."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0_only
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE, UserError
from hvdtrain.events.background_sink import BackgroundSink
from hvdtrain.events.log import Log, Sink
from hvdtrain.events.rank_log import LOGGER, RankWarnings, rank_log
from hvdtrain.events.terminal import terminal_sink, warn
from hvdtrain.events.writers import JsonLinesWriter
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.batch import Growth
from hvdtrain.tasks.transform import Transform, Transforms
from hvdtrain.training import header
from hvdtrain.training.build import build_learner, job_transform, load_libraries
from hvdtrain.training.data_facts import data_facts, identity
from hvdtrain.training.data_notes import notes
from hvdtrain.training.datasets import Datasets, recipe_of
from hvdtrain.training.health.heartbeat import Heartbeat, noted
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.hooks import hooks_of
from hvdtrain.training.input import fewest_samples
from hvdtrain.training.job import Job, make_job, make_saver
from hvdtrain.training.job_memory import LEAST_WEIGHTS, MemoryMeter, forecast_of_job
from hvdtrain.training.loop import train
from hvdtrain.training.lost import RunningJob, survival_of
from hvdtrain.training.memory import room_of_rank
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import stop_reason
from hvdtrain.training.replicas.probe import Probe
from hvdtrain.training.run_folder import record_environment, write_config
from hvdtrain.training.run_lock import RunLock
from hvdtrain.training.start import Start, start_or_resume
from hvdtrain.training.sync_point import close_all, fail, write_last_checkpoint
from hvdtrain.training.telemetry.throughput import measure_throughput

TRACKED_S = 2.0  # between two events of steps that a tracker gets


class JobResult(NamedTuple):
    """How a job ended, on every rank."""

    # exit code: DONE, or REQUEUE (LOST after the loss of a rank) if the job had to stop before its
    # end
    code: int
    run: Path  # path of the run folder on rank 0
    reason: str
    train_state: TrainState
    transform: Transform | Transforms | None = None  # the transform of x, or of each input


def train_job(
    config: Config,
    datasets: Datasets,
    communicator: Communicator,
    engine_reason: str,
    signals: Signals,
    heartbeat: Heartbeat,
    lock: RunLock,
    warnings: RankWarnings | None = None,
    watchdog: Watchdog | None = None,
    rank_notes: Sequence[str] = (),
) -> JobResult:
    """Runs the job. Every rank calls it; rank 0 locks and writes the run folder and the log.
    engine_reason: why this engine was chosen; rank_notes: further lines for the header.

    Raises UserError, on all ranks or on the rank that failed, and Diverged on all ranks.
    """
    heartbeat.beat("comparing the ranks", 0, 0)
    survival = survival_of(config, communicator)
    if communicator.size > 1:
        from hvdtrain.training.replicas.same_job import check_same_facts, facts

        check_same_facts(
            communicator, facts(config, data_facts(config, datasets), communicator.name)
        )
    heartbeat.beat("building the model", 0, 0)
    load_libraries(config)
    recipe = recipe_of(config, datasets)
    hooks = [*hooks_of(config), *datasets.train.hooks]
    memory = MemoryMeter(
        forecast_of_job(config, datasets, communicator, recipe), room_of_rank(config, communicator)
    )
    learner = build_learner(config, datasets.task, communicator)
    check_smallest_pass(config, recipe.batch, learner, communicator.size)
    heartbeat.under_way = learner.under_way
    start = start_or_resume(config, datasets, communicator, learner, lock, heartbeat)
    if communicator.size > 1:
        hosts = communicator.allgather_object(socket.gethostname())
        Probe(config, datasets.task).compare(communicator, learner, hosts, "before the first step")
    memory.begin(learner, start.weights, communicator.rank)
    throughput = measure_throughput(
        config, datasets.task, communicator, learner, is_small=start.weights < LEAST_WEIGHTS
    )
    found = [
        *rank_notes,
        *notes(config, datasets),
        *getattr(communicator, "notes", ()),
        *getattr(learner, "notes", ()),
    ]
    start = start._replace(notes=[*start.notes, *found])
    environment: dict[str, Any] = {}
    if communicator.rank == 0 and not start.is_over:  # before a collective: other ranks wait for it
        environment = record_environment(start.run)
    log = open_log(config, communicator, start, lock)
    record_config = (
        None if start.config_is_written else lambda: write_config(config, start.run, lock)
    )
    job = make_job(
        config,
        datasets,
        communicator,
        learner,
        signals=signals,
        heartbeat=heartbeat,
        warnings=warnings,
        log=log,
        start=start.train_state,
        run=start.run,
        checkpoint_limit_bytes=start.checkpoint_limit_bytes,
        record_config=record_config,
        open_run=lock.open,
        memory=memory,
        recipe=recipe,
        hooks=hooks,
        throughput=throughput,
    )
    start = start._replace(notes=[*start.notes, *job.hooks.load(start.train_state)])
    header.emit_start(job, start, engine_reason, environment)
    running = RunningJob(job)
    if survival is not None:
        running = survival.running_job(
            job,
            start.train_state,
            start.run,
            lock,
            watchdog,
            lambda: open_sinks(config, start.run, lock),
            lambda now: make_saver(
                config,
                identity(config, datasets),
                log,
                now,
                start.run,
                start.checkpoint_limit_bytes,
                record_config,
                lock.open,
            ),
        )
    log_path = start.run / "ranks" / f"rank-{communicator.rank:05d}.log"
    with (
        closing(running),
        rank_log(log_path if config.log.per_rank and not start.is_over else None),
        noted(heartbeat, communicator.rank),
    ):
        LOGGER.info(
            f"rank {communicator.rank} of {communicator.size} on {job.hosts[communicator.rank]}, "
            f"process {os.getpid()}: "
            f"{learner.describe()}"
        )
        heartbeat.training = True
        if memory.warning:
            warn(memory.warning)
        now = start.train_state
        while True:
            try:
                return train_to_the_end(running.job, start, now, lock)._replace(
                    transform=job_transform(datasets.task, config)
                )
            except Exception as error:
                if not running.outlives(error):
                    raise
            now = running.go_on()


def check_smallest_pass(config: Config, growth: Growth, learner: Learner, ranks: int) -> None:
    """Raises UserError on every rank if a rank has a micro-batch of one sample and the model has a
    batch norm that needs two."""
    readers = config.readers(ranks)
    batch = next(
        (
            batch
            for batch in (growth.first, *growth.to)
            if fewest_samples(config, batch, growth.first, readers) == 1
        ),
        None,
    )
    if batch is None or learner.trains_one_sample():
        return
    micro = f" in passes of batch.micro={config.batch.micro}" if config.batch.micro else ""
    on = f"{readers} rank{'s' if readers > 1 else ''}{micro}"
    what = (
        f"a batch of {batch} on {on} has a micro-batch of one sample, for which batch norm has no "
        "variance"
    )
    fix = (
        f"a batch of {2 * readers} or "
        f"more{', fewer ranks or norm.kind=sync' if readers > 1 else ''}; or a model without "
        "batch norm"
    )
    if micro:
        key = "batch.micro"
    elif batch != growth.first:
        key = "recipe.growth"
    else:
        key = "batch.size"
    raise UserError(
        what,
        config.where(key),
        "a batch.micro that leaves no micro-batch with one; or " * bool(micro) + fix,
    )


def train_to_the_end(job: Job, start: Start, now: TrainState, lock: RunLock) -> JobResult:
    """Trains from `now` to the last checkpoint. Every rank calls it."""
    if now == start.train_state:
        if job.config.guard.nonfinite == "rollback":
            job.checkpoints.save(now)  # so that there is always one to roll back to
        if not now.progress.step:
            job.samples.draw(now)
        if not start.is_over:
            job.hooks.start(now)
    now, reason = train(job, now)
    lock.ending()
    return finish(job, start, now, reason)


def open_log(config: Config, communicator: Communicator, start: Start, lock: RunLock) -> Log:
    """Opens events.jsonl, the terminal and the trackers on rank 0; only the terminal for a complete
    job, and nothing on other ranks.

    Every rank calls it. Raises UserError on all ranks if a tracker's package is missing.
    """

    return open_run_log(config, communicator, None if start.is_over else start.run, lock)


def open_run_log(
    config: Config, communicator: Communicator, run: Path | None, lock: RunLock
) -> Log:
    """Opens the log of a new or resumed run; without a run (None), only the terminal. Every rank
    calls it. Raises as open_log()."""

    def sinks() -> list[Sink]:
        return (
            [terminal_sink(sys.stdout, config.log)]
            if run is None
            else open_sinks(config, run, lock)
        )

    return Log(on_rank_0_only(communicator, sinks) or [])


def open_sinks(config: Config, run: Path, lock: RunLock) -> list[Sink]:
    """Opens events.jsonl, the terminal and the trackers, in this order. Raises UserError if a
    tracker's package is missing."""
    where = config.where("log.trackers")
    trackers = {
        name: plugins.load("events/trackers", name, where).build(config, run)
        for name in dict.fromkeys(config.log.trackers)
    }
    return [
        JsonLinesWriter(run / "events.jsonl", lock),
        terminal_sink(sys.stdout, config.log),
        *(
            BackgroundSink(tracker, f"log.trackers {name}", warn, step_interval_s=TRACKED_S)
            for name, tracker in trackers.items()
        ),
    ]


@contextlib.contextmanager
def closing(running: RunningJob) -> Iterator[None]:
    """Closes the job's resources. An error inside becomes the event "failed"."""
    failed = False
    try:
        yield
    except BaseException as error:
        failed = True
        fail(running.job, running.job.heartbeat.step, error)
        raise
    finally:
        close_all(running.job, running.job.prefetcher, failed=failed)


def load_best(job: Job, now: TrainState) -> None:
    """Loads the checkpoint of the best evaluation, after the last one was written. Every rank calls
    it."""
    best = job.checkpoints.load_best()
    if job.communicator.rank == 0 and best is not None and best.last != now.best:
        what = (
            f"the checkpoint of the best evaluation ({now.best:.4f} in epoch {now.best_epoch}) is "
            "not there"
        )
        warn(f"{what}: stop.restore_best uses step {best.progress.step}, {best.last:.4f}")


def finish(job: Job, start: Start, now: TrainState, reason: str) -> JobResult:
    """Writes the last checkpoint and the event "end", or "stop" if the job had to stop early. Every
    rank calls it.

    Raises as write_last_checkpoint().
    """
    now = job.telemetry.finish(now) if start.is_over else job.hooks.end(job.telemetry.finish(now))
    is_over = bool(stop_reason(job.config, now))
    if is_over and not start.is_over:
        job.samples.draw_at_end(now)
    failure = write_last_checkpoint(job, now, reason, is_over=is_over)
    memory_fields = job.memory.end(job.learner, job.communicator) if job.memory else {}
    if job.config.model.given:
        job.heartbeat.beat("giving the script its weights", now.progress.epoch, now.progress.step)
        if is_over and job.config.stop.restore_best:
            load_best(job, now)
        job.config.model.given.at_end(job.learner)
    if is_over:
        header.emit_end(job, start, now, reason, memory_fields)
        return JobResult(DONE, start.run, reason, now)
    header.emit_stop(job, start, now, reason, failure, memory_fields)
    return JobResult(job.health.stop_code, start.run, reason, now)

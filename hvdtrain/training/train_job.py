"""One job from its data sets to its last line: every rank starts from the same state, trains, and ends in the same way."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import on_rank_0_only
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import DONE, REQUEUE, Diverged, UserError, exit_code_of
from hvdtrain.events.background import CLOSE_S, BackgroundSink
from hvdtrain.events.log import Log, Sink
from hvdtrain.events.rank_log import LOGGER, rank_log
from hvdtrain.events.terminal import terminal_sink, warn
from hvdtrain.events.writers import JsonLinesWriter
from hvdtrain.training import summary
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import Datasets, facts
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import Job, make_job
from hvdtrain.training.loop import train
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import stop_reason
from hvdtrain.training.replicas.broadcast import check_same_facts
from hvdtrain.training.start import Start, start_or_resume

TRACKED_S = 2.0  # between two events of steps that a tracker gets
HASTY_S = 3.0  # that the end of a job which failed, or has to go, waits for what its sinks have not written


class JobResult(NamedTuple):
    """How a job ended, on every rank."""

    code: int  # exit code: DONE, or REQUEUE where the job had to stop before its end
    run: Path  # as rank 0 knows it
    reason: str
    train_state: TrainState


def train_job(
    config: Config,
    datasets: Datasets,
    communicator: Communicator,
    engine_reason: str,
    signals: Signals,
    heartbeat: Heartbeat,
) -> JobResult:
    """Every rank calls it; rank 0 writes the run folder and the log. engine_reason: why the communicator is this one.

    Raises UserError, on all ranks or on the one whose fault it is, and Diverged on all ranks.
    """
    check_same_facts(communicator, facts(config, datasets))
    heartbeat.beat("building the model", 0, 0)
    learner = build_learner(config, datasets.task, communicator)
    heartbeat.beat("reading the checkpoint", 0, 0)
    start = start_or_resume(config, datasets, communicator, learner)
    log = open_log(config, communicator, start.run)
    job = make_job(
        config,
        datasets,
        communicator,
        learner,
        signals=signals,
        heartbeat=heartbeat,
        log=log,
        start=start.train_state,
        run=start.run,
        checkpoint_limit_bytes=start.checkpoint_limit_bytes,
    )
    summary.emit_start(job, start, engine_reason)
    with closing(job), rank_log(start.run / "ranks" / f"rank-{communicator.rank:05d}.log" if config.log.per_rank else None):
        LOGGER.info(
            f"rank {communicator.rank} of {communicator.size} on {job.hosts[communicator.rank]}, process {os.getpid()}: "
            f"{learner.describe()}"
        )
        heartbeat.training = True
        if config.guard.nonfinite == "rollback":
            job.checkpoints.save(start.train_state)  # so that there is always one to roll back to
        now, reason = train(job, start.train_state)
        return finish(job, start, now, reason)


def open_log(config: Config, communicator: Communicator, run: Path) -> Log:
    """events.jsonl, the terminal and the trackers on rank 0; nothing on the other ranks. Every rank calls it.

    Raises UserError on all ranks where a tracker's package is missing.
    """
    where = config.where("log.trackers")

    def open_sinks() -> list[Sink]:
        trackers = {name: plugins.load("events/trackers", name, where).build(config, run) for name in dict.fromkeys(config.log.trackers)}
        return [
            JsonLinesWriter(run / "events.jsonl"),
            terminal_sink(sys.stdout, config.log),
            *(BackgroundSink(tracker, name, warn, step_interval_s=TRACKED_S) for name, tracker in trackers.items()),
        ]

    return Log(on_rank_0_only(communicator, open_sinks) or [])


@contextlib.contextmanager
def closing(job: Job) -> Iterator[None]:
    """Closes what the job has open. An error inside becomes the event "failed"; Diverged waits on all ranks for a checkpoint under way."""
    error: BaseException | None = None  # ours: sys.exc_info() may be one that the caller is handling
    try:
        yield
    except Diverged as diverged:  # raised on every rank alike: no rank ends the job while rank 0 writes
        error = diverged
        job.heartbeat.limit = "start_s"
        job.checkpoints.close_on_all_ranks()
        raise
    except BaseException as other:
        error = other
        raise
    finally:
        if error is not None:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            job.log.emit("failed", job.heartbeat.step, reason=reason, exit_code=exit_code_of(error))
        job.prefetcher.close(wait=error is None)
        job.checkpoints.close()
        job.log.close(CLOSE_S if error is None and not job.health.stop_request else HASTY_S)


def finish(job: Job, start: Start, now: TrainState, reason: str) -> JobResult:
    """Writes the last checkpoint and the event "end", or "stop" where the job had to stop before its end. Every rank calls it.

    Raises UserError or Diverged where the last checkpoint cannot be written and the job cannot be resumed without it.
    """
    now = job.telemetry.finish(now)
    is_over = bool(stop_reason(job.config, now))
    job.heartbeat.limit = "start_s"
    job.heartbeat.beat("writing the last checkpoint", now.progress.epoch, now.progress.step)
    last = job.checkpoints.finish(now)
    if last.failure and (is_over or not last.any_left):
        kind = Diverged if last.failure.endswith("is not finite") else UserError
        what = f"the job {'is done' if is_over else 'stopped'} ({reason}), but its last checkpoint is not written: {last.failure}"
        raise kind(what, str(start.run), "a lower optim.base_lr" if kind is Diverged else "make room; start it again")
    if is_over:
        summary.emit_end(job, start, now, reason)
        return JobResult(DONE, start.run, reason, now)
    summary.emit_stop(job, start, now, reason, last.failure)
    return JobResult(REQUEUE, start.run, reason, now)

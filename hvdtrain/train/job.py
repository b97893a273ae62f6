"""One job from its parts to its last line: builds, starts equal, trains, and tells what was reached."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance, to_yaml
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.data.images import augment
from hvdtrain.data.source import Source
from hvdtrain.errors import DONE, REQUEUE, Diverged, UserError, exit_code_of
from hvdtrain.events.background import CLOSE_S, BackgroundSink
from hvdtrain.events.log import Log, Sink
from hvdtrain.events.rank_log import LOGGER, rank_log
from hvdtrain.events.terminal import terminal_sink, warn
from hvdtrain.events.writers import JsonLinesWriter
from hvdtrain.frameworks.learner import Learner, Task
from hvdtrain.recipe import from_config
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.train import summary
from hvdtrain.train.build import build_learner, build_recipe, build_source, build_task
from hvdtrain.train.checkpoint import files
from hvdtrain.train.checkpoint.files import Identity, finished
from hvdtrain.train.checkpoint.resume import ResumePoint, begin, newest_good
from hvdtrain.train.checkpoint.saver import Saver
from hvdtrain.train.health.deadline import Deadline
from hvdtrain.train.health.heartbeat import Heartbeat
from hvdtrain.train.health.monitor import HealthMonitor
from hvdtrain.train.health.signals import Signals
from hvdtrain.train.input.prefetch import Prefetcher
from hvdtrain.train.loop import Job, train
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.train.progress.triggers import stop_reason
from hvdtrain.train.same_state import agree, on_rank_0, on_rank_0_alone, share_state
from hvdtrain.train.telemetry import startup
from hvdtrain.train.telemetry.telemetry import telemetry

SLOW_DISK = 1e8  # bytes a second
TRACKED_S = 2.0  # between two events of steps that a tracker gets
HASTY_S = 3.0  # that the end of a job which failed, or has to go, waits for what its sinks have not written


class Datasets(NamedTuple):
    """What a rank prepares by itself, before it meets the others."""

    train: Source
    val: Source
    task: Task


class JobResult(NamedTuple):
    """How a job came to its end."""

    code: int
    run: Path
    why: str
    train_state: TrainState


def prepare(config: Config, provenance: Provenance) -> Datasets:
    """Reads the data; what is missing or broken is a UserError on this rank."""
    train_source = build_source(config, provenance, "train")
    val_source = build_source(config, provenance, "val")
    build_recipe(config, provenance, len(train_source))
    augment.check_augmentation(config.augment, train_source.shape)
    return Datasets(train_source, val_source, build_task(train_source, val_source, provenance))


def train_job(
    config: Config, provenance: Provenance, parts: Datasets, communicator: Communicator, why: str, watch: tuple[Signals, Heartbeat]
) -> JobResult:
    """Every rank calls it; rank 0 speaks and writes. The exit code is DONE, or REQUEUE where the job had to stop before its end."""
    agree(communicator, facts(config, parts))
    signals, heartbeat = watch
    heartbeat.beat("building the model", 0, 0)
    learner = build_learner(config, provenance, parts.task, communicator)
    heartbeat.beat("reading the checkpoint", 0, 0)
    resume_point, digest, (limit_bytes, parameters) = _start(config, provenance, parts, communicator, learner)
    run, train_state = resume_point.run, resume_point.train_state
    log = Log(on_rank_0_alone(communicator, lambda: _open_sinks(config, provenance, run)) or [])
    hosts = communicator.allgather_object(socket.gethostname())
    times = (heartbeat.started_s, time.time(), time.monotonic)
    limit = Deadline(config.guard.max_time, os.environ, *times) if communicator.rank == 0 else None
    saver = Saver(run, config.checkpoint, identity(config, parts), log) if communicator.rank == 0 else None
    if saver:
        saver.go_on(train_state)
        saver.longest_s = limit_bytes / 8 / SLOW_DISK  # a guess, until one is written
    recipe = build_recipe(config, provenance, len(parts.train))
    prefetcher = Prefetcher(config, communicator, recipe, parts.train, learner)
    job = Job(
        *(config, communicator, learner, recipe, prefetcher, parts.val, log),
        HealthMonitor(config, communicator, signals, heartbeat, hosts, limit, saver),
        telemetry(config, provenance, (communicator, learner), hosts, log, run),
        _clock(train_state.seconds),
        noise_scale=NoiseScale(signal=train_state.noise[0], noise=train_state.noise[1]),
    )
    job.tell_start = lambda step: log.emit("started", step, **startup.fields(heartbeat))
    job.roll_back = lambda: _roll_back(job, run, limit_bytes)
    told = {"lines": summary.header(job, why, resume_point), "digest": digest, "engine": communicator.name, "parameters": parameters}
    log.emit("start", train_state.progress.step, **told, **summary.start_fields(job, resume_point))
    error: BaseException | None = None  # ours: sys.exc_info() would give one that the caller is handling, too
    try:
        with rank_log(run / "ranks" / f"rank-{communicator.rank:05d}.log" if config.log.per_rank else None):
            LOGGER.info(
                f"rank {communicator.rank} of {communicator.size} on {hosts[communicator.rank]}, process {os.getpid()}: "
                f"{learner.describe()}"
            )
            return _train(job, run, train_state)
    except Diverged as diverged:  # on every rank alike: none ends the job before a checkpoint under way is on the disk
        heartbeat.patient = True
        error = diverged
        on_rank_0(communicator, lambda: saver.close() if saver else None)
        raise
    except BaseException as other:
        error = other
        raise
    finally:
        if error is not None:
            log.emit("failed", heartbeat.step, reason=f"{type(error).__name__}: {error}".partition("\n")[0], exit_code=exit_code_of(error))
        prefetcher.close(wait=error is None)
        if saver:
            saver.close()
        log.close(CLOSE_S if error is None and not job.health.stop else HASTY_S)


def _train(job: Job, run: Path, train_state: TrainState) -> JobResult:
    """To the end, or to where the job has to stop; the last checkpoint is on the disk then."""
    heartbeat, config, saver = job.health.heartbeat, job.config, job.health.saver
    heartbeat.training = True
    if saver and config.guard.nonfinite == "rollback":
        saver.save(train_state, job.learner)  # there is always one to go back to
    now, why = train(job, train_state)
    now = job.telemetry.last(now)
    job.telemetry.close(now.progress.step)
    over = bool(stop_reason(config, now))  # else it has to stop before
    heartbeat.patient = True
    heartbeat.beat("writing the last checkpoint", now.progress.epoch, now.progress.step)
    failure, some = on_rank_0(job.communicator, lambda: (saver.finish(now, job.learner) if saver else "", bool(finished(run))))
    step = now.progress.step
    if failure and (over or not some):
        kind = Diverged if failure.endswith("is not finite") else UserError
        what = f"the job {'is done' if over else 'stopped'} ({why}), but its last checkpoint is not written: {failure}"
        raise kind(what, str(run), "a lower optim.base_lr" if kind is Diverged else "make room; start it again")
    fields = summary.end_fields(job, now)
    if over:
        job.log.emit("end", step, reason=why, exit_code=DONE, lines=summary.done(job, train_state, now, why, run), **fields)
        return JobResult(DONE, run, why, now)
    last = f"no checkpoint of step {step}: {failure}; older ones are there" if failure else f"the checkpoint of step {step} is written"
    job.log.emit("stop", step, reason=why, exit_code=REQUEUE, lines=summary.stopped(job, now, why, last, run), **fields)
    return JobResult(REQUEUE, run, why, now)


def facts(config: Config, parts: Datasets) -> dict[str, Any]:
    """What must be equal on all ranks: every key of the configuration, and what is known of the data."""
    known: dict[str, Any] = {"training samples": len(parts.train), "validation samples": len(parts.val)}
    task = parts.task
    known |= {
        "image shape": task.shape,
        "classes": task.classes,
        "mean of the pixels": task.mean.tolist(),
        "their deviation": task.std.tolist(),
    }
    for name, value in config.model_dump().items():
        known |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return known


def identity(config: Config, parts: Datasets) -> Identity:
    """What a job keeps through all its runs."""
    task = parts.task
    statistics = {"mean": task.mean.tolist(), "std": task.std.tolist()}
    data = {"samples": len(parts.train), "shape": list(task.shape), "classes": task.classes, **statistics}
    return {"seed": config.seed, "data": data}


def _start(
    config: Config, provenance: Provenance, parts: Datasets, communicator: Communicator, learner: Learner
) -> tuple[ResumePoint, str, tuple[int, int]]:
    """(what the job begins from, the digest that all ranks have then, (bytes that a file of a checkpoint may have, weights))."""
    sizes = [(name, array.size, array.nbytes) for name, array in learner.views()]
    limit_bytes = 2**20 + 8 * sum(many for _, _, many in sizes)  # slots that a user's optimizer has not made yet, too
    total = len(parts.train) * from_config.total_epochs(config)
    arrays: list[Arrays | None] = [None]

    def look() -> ResumePoint:
        resume_point, arrays[0] = begin(config, provenance, identity(config, parts), total, limit_bytes)
        return resume_point

    resume_point = on_rank_0(communicator, look)
    digest = share_state(communicator, learner, arrays[0])
    on_rank_0(
        communicator, lambda: _write_config(config, resume_point)
    )  # not before: what cannot be resumed leaves the run folder as it was
    return resume_point, digest, (limit_bytes, sum(size for name, size, _ in sizes if name.startswith("p.")))


def _roll_back(job: Job, run: Path, limit_bytes: int) -> None:
    """Every rank loads the newest good checkpoint, which rank 0 reads."""
    arrays: list[Arrays | None] = [None]

    def look() -> None:
        assert job.health.saver is not None
        job.health.saver.close()
        _, arrays[0], _ = newest_good(run, limit_bytes)

    on_rank_0(job.communicator, look)
    share_state(job.communicator, job.learner, arrays[0])


def _clock(before_s: float) -> Callable[[], float]:
    """Seconds spent in the job, with those of its runs before this one."""
    began = time.perf_counter()
    return lambda: before_s + time.perf_counter() - began


def _write_config(config: Config, resume_point: ResumePoint) -> None:
    """On a full disk a job that goes on keeps its former one, and one that begins is refused."""
    unfinished = resume_point.run / ".config.yaml.unfinished"
    try:
        unfinished.write_text(to_yaml(config), encoding="utf-8")
        files.sync(unfinished)
        unfinished.replace(resume_point.run / "config.yaml")
    except OSError as error:
        what = f"cannot write config.yaml: {error.strerror or error}"
        if not resume_point.train_state.progress.step:
            raise UserError(what, str(resume_point.run), "give run= a folder that can be written, with room") from None
        resume_point.notes.append(what)


def _open_sinks(config: Config, provenance: Provenance, run: Path) -> list[Sink]:
    """Of rank 0. A sink whose package is missing is a UserError before the job begins."""
    where = provenance.where("log.trackers")
    made: dict[str, Sink] = {
        name: plugins.load("events/trackers", name, where).build(config, run) for name in dict.fromkeys(config.log.trackers)
    }
    return [
        JsonLinesWriter(run / "events.jsonl"),
        terminal_sink(sys.stdout, config.log),
        *(_aside(name, sink) for name, sink in made.items()),
    ]


def _aside(name: str, sink: Sink) -> BackgroundSink:
    return BackgroundSink(lambda: sink, name, warn, step_interval_s=TRACKED_S)

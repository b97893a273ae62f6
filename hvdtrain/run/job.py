"""One job from its parts to its last line: builds, starts equal, trains, and tells what was reached."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.configure import Origins, to_yaml
from hvdtrain.data import augment
from hvdtrain.data.source import Source
from hvdtrain.errors import DONE, REQUEUE, Diverged, UserError
from hvdtrain.frames.learner import Learner, Task
from hvdtrain.recipe import compose
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.recipe.words import batch_words, lr_words
from hvdtrain.report.log import Log
from hvdtrain.report.sinks import Console, JsonLines
from hvdtrain.run import checkpoint, startup
from hvdtrain.run.build import build_learner, build_recipe, build_source, build_task
from hvdtrain.run.checkpoint import Identity, finished
from hvdtrain.run.deadline import Deadline
from hvdtrain.run.feed import Feed
from hvdtrain.run.guard import Guard
from hvdtrain.run.loop import Job, train
from hvdtrain.run.micro import passes
from hvdtrain.run.pulse import Pulse
from hvdtrain.run.resume import Beginning, begin, newest_good
from hvdtrain.run.saver import Saver
from hvdtrain.run.signals import Signals
from hvdtrain.run.standing import Standing
from hvdtrain.run.start import agree, on_rank_0, share_state
from hvdtrain.run.turns import stop_reason
from hvdtrain.state import Arrays

SLOW_DISK = 1e8  # bytes a second


class Parts(NamedTuple):
    """What a rank prepares by itself, before it meets the others."""

    train: Source
    val: Source
    task: Task


def prepare(config: Config, origins: Origins) -> Parts:
    """Reads the data; what is missing or broken is a UserError on this rank."""
    train_source = build_source(config, origins, "train")
    val_source = build_source(config, origins, "val")
    build_recipe(config, origins, len(train_source))
    augment.check(config.augment, train_source.shape, origins)
    return Parts(train_source, val_source, build_task(train_source, val_source, origins))


def train_job(config: Config, origins: Origins, parts: Parts, engine: Engine, why: str, watch: tuple[Signals, Pulse]) -> int:
    """Every rank calls it; rank 0 speaks and writes. The exit code: DONE, or REQUEUE where it had to stop before its end."""
    agree(engine, facts(config, parts))
    signals, pulse = watch
    pulse.beat("building the model", 0, 0)
    learner = build_learner(config, origins, parts.task, engine)
    pulse.beat("reading the checkpoint", 0, 0)
    beginning, digest, limit_bytes = _start(config, origins, parts, engine, learner)
    run, standing = beginning.run, beginning.standing
    log = Log(_open_sinks(config, run) if engine.rank == 0 else [])
    hosts = engine.exchange(socket.gethostname())
    times = (pulse.started_s, time.time(), time.monotonic)
    limit = Deadline(config.guard.max_time, os.environ, *times) if engine.rank == 0 else None
    saver = Saver(run, config.checkpoint, identity(config, parts), log) if engine.rank == 0 else None
    if saver:
        saver.go_on(standing)
        saver.longest_s = limit_bytes / 8 / SLOW_DISK  # a guess, until one is written
    recipe = build_recipe(config, origins, len(parts.train))
    feed = Feed(config, engine, recipe, parts.train, learner)
    job = Job(
        *(config, engine, learner, recipe, feed, parts.val, log),
        Guard(config, engine, signals, pulse, hosts, limit, saver),
        _clock(standing.seconds),
        noise_scale=NoiseScale(signal=standing.noise[0], noise=standing.noise[1]),
    )
    job.tell_start = lambda step: log.emit("started", step, **startup.fields(pulse))
    job.roll_back = lambda: _roll_back(job, run, limit_bytes)
    lines = _header(job, why, standing, beginning)
    log.emit("start", standing.progress.step, lines=lines, digest=digest, ranks=engine.size, hosts=sorted(set(hosts)))
    try:
        return _train(job, run, standing)
    except Diverged:  # on every rank alike: none ends the job before a checkpoint under way is on the disk
        pulse.patient = True
        on_rank_0(engine, lambda: saver.close() if saver else None)
        raise
    finally:
        feed.close(wait=sys.exc_info()[0] is None)
        if saver:
            saver.close()


def _train(job: Job, run: Path, standing: Standing) -> int:
    """To the end, or to where the job has to stop; the last checkpoint is on the disk then."""
    pulse, config, saver = job.guard.pulse, job.config, job.guard.saver
    pulse.training = True
    if saver and config.guard.nonfinite == "rollback":
        saver.save(standing, job.learner)  # there is always one to go back to
    now, why = train(job, standing)
    over = bool(stop_reason(config, now))  # else it has to stop before
    pulse.patient = True
    pulse.beat("writing the last checkpoint", now.progress.epoch, now.progress.step)
    failure, some = on_rank_0(job.engine, lambda: (saver.finish(now, job.learner) if saver else "", bool(finished(run))))
    step = now.progress.step
    if failure and (over or not some):
        kind = Diverged if failure.endswith("is not finite") else UserError
        what = f"the job {'is done' if over else 'stopped'} ({why}), but its last checkpoint is not written: {failure}"
        raise kind(what, str(run), "a lower optim.base_lr" if kind is Diverged else "make room; start it again")
    if over:
        reached = f"validation accuracy {now.accuracy:.4f} after {now.progress.epochs:.2f} epochs and {now.seconds:.1f} s"
        job.log.emit("end", step, reason=why, lines=[f"done ({why}): {reached}", f"run folder: {run}"])
        return DONE
    last = f"no checkpoint of step {step}: {failure}; older ones are there" if failure else f"the checkpoint of step {step} is written"
    again = f"the same command goes on, with run={run}{' resume=auto' * (config.resume == 'no')}"
    job.log.emit("stop", step, reason=why, lines=[f"stopped ({why}) at step {step}, epoch {now.progress.epochs:.2f}: {last}", again])
    return REQUEUE


def facts(config: Config, parts: Parts) -> dict[str, Any]:
    """What must be equal on all ranks: every key of the configuration, and what is known of the data."""
    known: dict[str, Any] = {"training samples": len(parts.train), "validation samples": len(parts.val)}
    task = parts.task
    known |= {
        "image shape": task.shape,
        "classes": task.classes,
        "mean of the pixels": task.mean.tolist(),
        "their deviation": task.std.tolist(),
    }
    for name, value in dataclasses.asdict(config).items():
        known |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return known


def identity(config: Config, parts: Parts) -> Identity:
    """What a job keeps through all its runs."""
    task = parts.task
    statistics = {"mean": task.mean.tolist(), "std": task.std.tolist()}
    data = {"samples": len(parts.train), "shape": list(task.shape), "classes": task.classes, **statistics}
    return {"seed": config.seed, "data": data}


def _start(config: Config, origins: Origins, parts: Parts, engine: Engine, learner: Learner) -> tuple[Beginning, str, int]:
    """(what the job begins from, the digest that all ranks have then, the bytes that a file of a checkpoint may have)."""
    limit_bytes = 2**20 + 8 * sum(array.nbytes for _, array in learner.views())  # slots that a user's optimizer has not made yet, too
    total = len(parts.train) * compose.epochs(config)
    arrays: list[Arrays | None] = [None]

    def look() -> Beginning:
        beginning, arrays[0] = begin(config, origins, identity(config, parts), total, limit_bytes)
        return beginning

    beginning = on_rank_0(engine, look)
    digest = share_state(engine, learner, arrays[0])
    on_rank_0(engine, lambda: _write_config(config, beginning))  # not before: what cannot be resumed leaves the run folder as it was
    return beginning, digest, limit_bytes


def _roll_back(job: Job, run: Path, limit_bytes: int) -> None:
    """Every rank loads the newest good checkpoint, which rank 0 reads."""
    arrays: list[Arrays | None] = [None]

    def look() -> None:
        assert job.guard.saver is not None
        job.guard.saver.close()
        _, arrays[0], _ = newest_good(run, limit_bytes)

    on_rank_0(job.engine, look)
    share_state(job.engine, job.learner, arrays[0])


def _clock(before_s: float) -> Callable[[], float]:
    """Seconds spent in the job, with those of its runs before this one."""
    began = time.perf_counter()
    return lambda: before_s + time.perf_counter() - began


def _write_config(config: Config, beginning: Beginning) -> None:
    """On a full disk a job that goes on keeps its former one, and one that begins is refused."""
    unfinished = beginning.run / ".config.yaml.unfinished"
    try:
        unfinished.write_text(to_yaml(config), encoding="utf-8")
        checkpoint.sync(unfinished)
        unfinished.replace(beginning.run / "config.yaml")
    except OSError as error:
        what = f"cannot write config.yaml: {error.strerror or error}"
        if not beginning.standing.progress.step:
            raise UserError(what, str(beginning.run), "give run= a folder that can be written, with room") from None
        beginning.notes.append(what)


def _open_sinks(config: Config, run: Path) -> list[Console | JsonLines]:
    return [Console(sys.stdout, config.log.every_s), JsonLines(run / "events.jsonl")]


def _header(job: Job, why: str, standing: Standing, beginning: Beginning) -> list[str]:
    """What will run, in a few lines."""
    config, engine, hosts = job.config, job.engine, job.guard.hosts
    where = ", ".join(f"{host} x {hosts.count(host)}" for host in sorted(set(hosts)))
    low, high = config.batch.size // engine.size, -(-config.batch.size // engine.size)
    share = f"{low}" if low == high else f"{low} or {high}"
    counts = f"{job.feed.samples:,} training and {len(job.val):,} validation samples"
    lines = [
        f"ranks   {engine.size} ({where}), engine {engine.name}: {why}",
        f"data    {config.data.name}: {counts}, {config.data.sampling} sampling, {job.feed.words}",
        f"batch   {batch_words(job.recipe)} over all ranks, {share} on each{' at first' * bool(job.recipe.batch.to)}",
        f"recipe  {config.optim.name}, {lr_words(config, job.feed.samples)}",
        f"model   {config.model.name}: {job.learner.describe()}",
        f"run     {beginning.run}",
    ]
    if config.norm.kind != "batch":
        lines.insert(4, f"norm    {_norm_words(config, -(-high // passes(config, high, config.batch.size, config.batch.size)))}")
    if standing.progress.step:
        lines.append(f"resume  from step {standing.progress.step}, epoch {standing.progress.epochs:.2f}")
    if job.guard.deadline and job.guard.deadline.words:
        lines.append(f"limit   {job.guard.deadline.words}")
    return lines + [f"        {note}" for note in beginning.notes]


def _norm_words(config: Config, samples: int) -> str:
    """Over what batch norm takes its statistics; `samples` of one forward pass."""
    if config.norm.kind == "sync":
        return "batch norm over the samples of all ranks"
    small = f": a pass has {samples}, so each is a ghost of its own" if config.norm.ghost >= samples else ""
    return f"batch norm over ghosts of {config.norm.ghost} samples{small}"

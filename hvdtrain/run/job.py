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
from hvdtrain.data.source import Source
from hvdtrain.errors import DONE, REQUEUE, UserError
from hvdtrain.frames.learner import Learner, Task
from hvdtrain.recipe import compose
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.recipe.words import batch_words, lr_words
from hvdtrain.report.log import Log
from hvdtrain.report.sinks import Console, JsonLines
from hvdtrain.run import checkpoint
from hvdtrain.run.build import build_learner, build_recipe, build_source, build_task
from hvdtrain.run.checkpoint import Identity
from hvdtrain.run.deadline import Deadline
from hvdtrain.run.guard import Guard
from hvdtrain.run.loop import Job, train
from hvdtrain.run.micro import passes
from hvdtrain.run.pulse import Pulse
from hvdtrain.run.resume import Beginning, begin, newest_good
from hvdtrain.run.saver import Saver
from hvdtrain.run.signals import Signals
from hvdtrain.run.standing import Standing
from hvdtrain.run.start import agree, on_rank_0, share_state
from hvdtrain.state import Arrays


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
    job = Job(
        *(config, engine, learner, build_recipe(config, origins, len(parts.train)), parts.train, parts.val, log),
        Guard(config, engine, signals, pulse, limit, hosts),
        _clock(standing.seconds),
        Saver(run, config.checkpoint, identity(config, parts), log) if engine.rank == 0 else None,
        noise_scale=NoiseScale(signal=standing.noise[0], noise=standing.noise[1]),
    )
    job.roll_back = lambda: _roll_back(job, run, limit_bytes)
    if job.saver:
        job.saver.go_on(standing.progress.step)
    lines = _header(job, why, standing, beginning)
    log.emit("start", standing.progress.step, lines=lines, digest=digest, ranks=engine.size, hosts=sorted(set(hosts)))
    try:
        return _train(job, run, standing)
    finally:
        if job.saver:
            job.saver.close()  # a checkpoint under way is finished, whatever happened


def _train(job: Job, run: Path, standing: Standing) -> int:
    """To the end, or to where the job has to stop; the last checkpoint is on the disk then."""
    pulse, config = job.guard.pulse, job.config
    pulse.training = True
    if job.saver and config.guard.nonfinite == "rollback":
        job.saver.save(standing, job.learner)  # there is always one to go back to
    now, why = train(job, standing)
    pulse.patient = True
    pulse.beat("writing the last checkpoint", now.progress.epoch, now.progress.step)
    failure = on_rank_0(job.engine, lambda: job.saver.finish(now, job.learner) if job.saver else "")
    step = now.progress.step
    if job.guard.stop:
        lost = f"no checkpoint of step {step}: {failure}" if failure else f"the checkpoint of step {step} is written"
        lines = [f"stopped ({why}) at step {step}, epoch {now.progress.epochs:.2f}: {lost}", f"the same command with run={run} goes on"]
        job.log.emit("stop", step, reason=why, lines=lines)
        return REQUEUE
    if failure:
        raise UserError(
            f"the job is done ({why}), but its last checkpoint is not written: {failure}", str(run), "make room; start it again"
        )
    reached = f"validation accuracy {now.accuracy:.4f} after {now.progress.epochs:.2f} epochs and {now.seconds:.1f} s"
    job.log.emit("end", step, reason=why, lines=[f"done ({why}): {reached}", f"run folder: {run}"])
    return DONE


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
    if engine.rank == 0:
        _write_config(config, beginning.run)  # not before: what cannot be resumed leaves the run folder as it was
    return beginning, digest, limit_bytes


def _roll_back(job: Job, run: Path, limit_bytes: int) -> None:
    """Every rank loads the newest good checkpoint, which rank 0 reads."""
    arrays: list[Arrays | None] = [None]

    def look() -> None:
        assert job.saver is not None
        job.saver.close()
        _, arrays[0], _ = newest_good(run, limit_bytes)

    on_rank_0(job.engine, look)
    share_state(job.engine, job.learner, arrays[0])


def _clock(before_s: float) -> Callable[[], float]:
    """Seconds spent in the job, with those of its runs before this one."""
    began = time.perf_counter()
    return lambda: before_s + time.perf_counter() - began


def _write_config(config: Config, run: Path) -> None:
    unfinished = run / ".config.yaml.unfinished"
    unfinished.write_text(to_yaml(config), encoding="utf-8")
    checkpoint.sync(unfinished)
    unfinished.replace(run / "config.yaml")


def _open_sinks(config: Config, run: Path) -> list[Console | JsonLines]:
    return [Console(sys.stdout, config.log.every_s), JsonLines(run / "events.jsonl")]


def _header(job: Job, why: str, standing: Standing, beginning: Beginning) -> list[str]:
    """What will run, in a few lines."""
    config, engine, hosts = job.config, job.engine, job.guard.hosts
    where = ", ".join(f"{host} x {hosts.count(host)}" for host in sorted(set(hosts)))
    low, high = config.batch.size // engine.size, -(-config.batch.size // engine.size)
    share = f"{low}" if low == high else f"{low} or {high}"
    counts = f"{len(job.train):,} training and {len(job.val):,} validation samples"
    lines = [
        f"ranks   {engine.size} ({where}), engine {engine.name}: {why}",
        f"data    {config.data.name}: {counts}, {config.data.sampling} sampling",
        f"batch   {batch_words(job.recipe)} over all ranks, {share} on each{' at first' * bool(job.recipe.batch.to)}",
        f"recipe  {config.optim.name}, {lr_words(config, len(job.train))}",
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

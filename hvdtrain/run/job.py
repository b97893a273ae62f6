"""One job from its parts to its last line: builds, starts equal, trains, and tells what was reached."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.configure import Origins, to_yaml
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frames.learner import Task
from hvdtrain.recipe import compose
from hvdtrain.recipe.words import batch_words, lr_words
from hvdtrain.report.log import Log
from hvdtrain.report.sinks import Console, JsonLines
from hvdtrain.run import checkpoint
from hvdtrain.run.build import build_learner, build_recipe, build_source, build_task, make_run_folder
from hvdtrain.run.checkpoint import Standing
from hvdtrain.run.loop import Job, stop_reason, train
from hvdtrain.run.micro import passes
from hvdtrain.run.start import agree, share_state
from hvdtrain.state import Arrays, Progress


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


def train_job(config: Config, origins: Origins, parts: Parts, engine: Engine, why: str) -> Standing:
    """Every rank calls it; rank 0 speaks and writes."""
    agree(engine, facts(config, parts))
    learner = build_learner(config, origins, parts.task, engine)
    run, standing, restored = _begin(config, origins, parts, engine)
    digest = share_state(engine, learner, restored)
    if engine.rank == 0:
        _write_config(config, run)  # not before: what cannot be resumed leaves the run folder as it was
    log = Log(_open_sinks(config, run) if engine.rank == 0 else [])
    job = Job(config, engine, learner, build_recipe(config, origins, len(parts.train)), parts.train, parts.val, log, run)
    hosts = engine.exchange(socket.gethostname())
    lines = _header(job, why, hosts, standing)
    log.emit("start", standing.progress.step, lines=lines, digest=digest, ranks=engine.size, hosts=sorted(set(hosts)))
    standing = train(job, standing)
    reason = stop_reason(config, standing)
    reached = f"validation accuracy {standing.accuracy:.4f} after {standing.progress.epochs:.2f} epochs and {standing.seconds:.1f} s"
    log.emit("end", standing.progress.step, reason=reason, lines=[f"done ({reason}): {reached}", f"run folder: {run}"])
    return standing


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


def _begin(config: Config, origins: Origins, parts: Parts, engine: Engine) -> tuple[Path, Standing, Arrays | None]:
    """Rank 0 makes the run folder and reads what there is to resume; the others hear of it, and of what went wrong."""
    begun: tuple[Path, Standing, Arrays | None] | None = None
    failure: UserError | None = None
    if engine.rank == 0:
        try:
            begun = _begin_alone(config, origins, parts)
        except UserError as error:
            failure = error
    run, standing, failure = engine.exchange((begun[0], begun[1], None) if begun else (None, None, failure))[0]
    if failure:
        raise failure
    return run, standing, begun[2] if begun else None


def _begin_alone(config: Config, origins: Origins, parts: Parts) -> tuple[Path, Standing, Arrays | None]:
    progress = Progress(dataset=len(parts.train), total=len(parts.train) * compose.epochs(config))
    standing, restored = Standing(progress), None
    if config.resume != "no":
        folder = checkpoint.newest(Path(config.resume).expanduser())
        standing, restored = checkpoint.load(folder, len(parts.train), config.seed, progress.total)
        if standing.target != config.stop.target_accuracy:  # epochs at another target do not count
            standing = dataclasses.replace(standing, at_target=0)
    return make_run_folder(config, origins), standing, restored


def _write_config(config: Config, run: Path) -> None:
    unfinished = run / ".config.yaml.unfinished"
    unfinished.write_text(to_yaml(config))
    unfinished.replace(run / "config.yaml")


def _open_sinks(config: Config, run: Path) -> list[Console | JsonLines]:
    return [Console(sys.stdout, config.log.every_s), JsonLines(run / "events.jsonl")]


def _header(job: Job, why: str, hosts: list[str], standing: Standing) -> list[str]:
    """What will run, in a few lines."""
    config, engine = job.config, job.engine
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
        f"run     {job.run}",
    ]
    if config.norm.kind != "batch":
        lines.insert(4, f"norm    {_norm_words(config, -(-high // passes(config, high, config.batch.size, config.batch.size)))}")
    if standing.progress.step:
        lines.append(f"resume  from step {standing.progress.step}, epoch {standing.progress.epochs:.2f}")
    return lines


def _norm_words(config: Config, samples: int) -> str:
    """Over what batch norm takes its statistics; `samples` of one forward pass."""
    if config.norm.kind == "sync":
        return "batch norm over the samples of all ranks"
    small = f": a pass has {samples}, so each is a ghost of its own" if config.norm.ghost >= samples else ""
    return f"batch norm over ghosts of {config.norm.ghost} samples{small}"

"""The training loop, in the order in which things happen."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.data.sampler import share
from hvdtrain.data.source import Source
from hvdtrain.frames.learner import Learner
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.report.log import Log
from hvdtrain.run import checkpoint, tally
from hvdtrain.run.checkpoint import Standing
from hvdtrain.run.micro import read, rows_of_step
from hvdtrain.state import Hyper, Progress, Sums, fold


@dataclass(frozen=True)
class Job:
    """The live objects of one rank."""

    config: Config
    engine: Engine
    learner: Learner
    recipe: Recipe
    train: Source
    val: Source
    log: Log
    run: Path
    noise_scale: NoiseScale = field(default_factory=NoiseScale)


def train(job: Job, now: Standing) -> Standing:
    """Trains until the last epoch, max_steps, or the target is held; one evaluation and one checkpoint per epoch."""
    c = job.config
    while not stop_reason(job.config, now):
        started, before = time.perf_counter(), now.progress
        p, last, sums = train_epoch(job, before)
        epoch_s = time.perf_counter() - started  # the sums are read by now, so the device is done
        val = evaluate(job)
        accuracy = val["right"] / val["count"]
        reached = c.stop.target_accuracy is not None and accuracy >= c.stop.target_accuracy
        at_target = now.at_target + 1 if reached else 0
        now = Standing(p, now.seconds + time.perf_counter() - started, at_target, c.stop.target_accuracy, accuracy)
        job.log.emit(
            "epoch",
            p.step,
            epoch=before.epoch + 1,
            seconds=round(now.seconds, 3),
            epoch_s=round(epoch_s, 3),
            images_per_s=round((p.samples - before.samples) / epoch_s, 1),
            train_loss=sums["loss"] / sums["count"],
            val_loss=val["loss"] / val["count"],
            val_accuracy=accuracy,
            val_count=int(val["count"]),
            lr=last.lr,
            batch=last.batch,
            **({"noise_scale": job.noise_scale.value} if c.log.noise_scale else {}),
        )
        if job.engine.rank == 0:
            checkpoint.save(job.run, now, job.learner.state(), c.seed, c.checkpoint.keep_last)
    return now


def stop_reason(config: Config, now: Standing) -> str:
    """Why the job is over; empty while it is not. Equal on all ranks, since all that it reads is."""
    target = config.stop.target_accuracy
    if target is not None and now.at_target >= config.stop.patience:
        return f"stop.target_accuracy={target:g} held for {now.at_target} epoch{'s' * (now.at_target > 1)}"
    if config.max_steps is not None and now.progress.step >= config.max_steps:
        return f"max_steps={config.max_steps}"
    return f"epochs={now.progress.total // now.progress.dataset}" if now.progress.done else ""


def train_epoch(job: Job, p: Progress) -> tuple[Progress, Hyper, Sums]:
    """Steps up to the one that completes the epoch: (progress, numbers of the last step, sums of all ranks)."""
    c, epoch, hyper = job.config, p.epoch, job.recipe.at(p)
    whole, since, spoken = tally.zero(), tally.zero(), time.perf_counter()
    while p.epoch == epoch and not (c.max_steps is not None and p.step >= c.max_steps):
        hyper = job.recipe.at(p)
        rows = rows_of_step(c, p, hyper, job.recipe.batch.first, job.engine)
        micro = [job.learner.put(read(job.train, part, hyper, c.seed)) for part in rows]
        since = tally.add(since, job.learner.step(micro, hyper, fold(c.seed, p.step)))
        p = p.advance(hyper.batch)
        if p.step % c.log.every_steps == 0 or p.epoch > epoch or p.step == c.max_steps:
            since = tally.total(job.engine, since, "train.sums")  # with evaluation, the only place where the host waits for the device
            whole = tally.add(whole, since)
            loss, images_per_s = since["loss"] / since["count"], since["count"] / (time.perf_counter() - spoken)
            told = {"epochs": p.epochs, "of": p.total // p.dataset, "loss": loss, "images_per_s": images_per_s, "lr": hyper.lr}
            job.log.emit("step", p.step, **told, batch=hyper.batch, **job.noise_scale.read(since))
            since, spoken = tally.zero(), time.perf_counter()
    return p, hyper, whole


def evaluate(job: Job) -> Sums:
    """Loss, hits and count over the whole validation set, each sample once, whatever the number of ranks."""
    job.learner.settle(job.engine)
    start, end = share(len(job.val), job.engine.rank, job.engine.size)
    sums = tally.zero()
    for first in range(start, end, job.config.batch.evaluate):
        rows = np.arange(first, min(first + job.config.batch.evaluate, end))
        sums = tally.add(sums, job.learner.evaluate(job.learner.put(job.val.read(rows))))
    sums = tally.total(job.engine, sums, "val.sums")
    assert sums["count"] == len(job.val), (sums["count"], len(job.val))
    return sums

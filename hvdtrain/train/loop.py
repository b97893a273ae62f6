"""The training loop, in the order in which things happen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.sums import allreduce_sums
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.seeds import fold
from hvdtrain.data.sampler import share_bounds
from hvdtrain.data.source import Source
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.train.health.monitor import HealthMonitor
from hvdtrain.train.input.prefetch import Prefetcher
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.train.progress.triggers import (
    ASK_EVERY,
    epoch_fields,
    evaluation_due,
    is_sync_point,
    judge,
    nonfinite_fields,
    step_fields,
    stop_reason,
)
from hvdtrain.train.telemetry.telemetry import Telemetry


@dataclass
class Job:
    """The live objects of one rank."""

    config: Config
    communicator: Communicator
    learner: Learner
    recipe: Recipe
    prefetcher: Prefetcher  # of the training samples
    val: Source
    log: Log
    health: HealthMonitor
    telemetry: Telemetry
    clock: Callable[[], float] = time.perf_counter  # seconds spent in this job so far, over all its runs
    tell_start: Callable[[int], None] = lambda step: None  # once the first steps are done
    roll_back: Callable[[], None] = lambda: None  # loads the newest checkpoint into every rank
    noise_scale: NoiseScale = field(default_factory=NoiseScale)


def train(job: Job, now: TrainState) -> tuple[TrainState, str]:
    """Trains until the job is over, or has to stop before: (standing, why). One evaluation per epoch; what is due is written."""
    while not (why := stop_reason(job.config, now) or job.health.stop):
        now = evaluate_epoch(job, now) if evaluation_due(job.config, now) else train_to_sync_point(job, now)
        if job.health.saver and not job.health.stop and not evaluation_due(job.config, now):
            job.health.saver.offer(now, job.learner)  # rank 0 alone writes
    return now, why


def train_to_sync_point(job: Job, now: TrainState) -> TrainState:
    """Steps up to the next one at which all ranks meet: their sums are added up, their statistics settled, their wishes heard."""
    c, p, since, began = job.config, now.progress, zero_sums(), time.perf_counter()
    while True:
        job.health.heartbeat.beat("reading samples", p.epoch, p.step)
        job.telemetry.turn(p.step)
        hyper, micro = job.prefetcher.take(p)
        job.health.heartbeat.beat("step", p.epoch, p.step)
        since = add_sums(since, job.learner.step(micro, hyper, fold(c.seed, p.step)))
        p = p.advance(hyper.batch)
        if is_sync_point(c, now, p):
            break
    job.health.heartbeat.beat("meeting", p.epoch, p.step)
    job.learner.sync_buffers(job.communicator)
    sums = allreduce_sums(
        job.communicator, since | job.health.flags(p.step) | job.telemetry.flags(), "train.sums"
    )  # the host waits for the device here
    seconds = time.perf_counter() - began
    spent = job.telemetry.read(sums, p.step, seconds)
    if job.health.heartbeat.patient:
        job.tell_start(p.step)
    job.health.after_sync(sums)
    after = replace(now, progress=p, seconds=job.clock(), lr=hyper.lr, batch=hyper.batch).add_energy(sums)
    if not job.health.is_finite(after, sums):
        after = job.health.handle_nonfinite(after, sums, job.roll_back)
        job.log.emit("nonfinite", p.step, **nonfinite_fields(c, after))
        if c.guard.nonfinite == "rollback" or not math.isfinite(sums["loss"]):
            return after  # these sums are of weights that are no more, or are none
    job.health.check_equal(job.learner, now, after, hyper, bool(sums["save"]) or evaluation_due(c, after))
    job.log.emit("step", p.step, **(step_fields(after, sums, seconds) | spent | job.noise_scale.update(sums)))
    return after.trained(sums, seconds, (job.noise_scale.signal, job.noise_scale.noise))


def evaluate_epoch(job: Job, now: TrainState) -> TrainState:
    """The epoch's evaluation and its line; unchanged where the job has to stop in the middle of it."""
    val = evaluate(job, now)
    if val is None:
        return now
    done, reached = judge(job.config, now := now.add_energy(val), val, job.clock(), job.telemetry.kinds)
    fields = epoch_fields(job.config, now, done, val, job.noise_scale.value) | job.telemetry.epoch(now, val, done.seconds)
    job.log.emit("epoch", now.progress.step, **fields)
    for target in reached:
        job.log.emit("target", now.progress.step, **target._asdict())
    return done


def evaluate(job: Job, now: TrainState) -> Sums | None:
    """Loss, hits and count over the whole validation set, each sample once, whatever the number of ranks; None where the job has to stop.

    The ranks have settled: they met before.
    """
    size, p = job.config.batch.evaluate, now.progress
    start, end = share_bounds(len(job.val), job.communicator.rank, job.communicator.size)
    largest = -(-len(job.val) // job.communicator.size)
    turns = range(start, start + largest, size)  # equally many on every rank
    sums = zero_sums()
    for turn, batch in enumerate(job.prefetcher.evaluation(job.val, [np.arange(first, min(first + size, end)) for first in turns])):
        job.health.heartbeat.beat("evaluation", p.epoch, p.step)
        job.telemetry.energy.keep_up()
        if turn % ASK_EVERY == 0 and job.health.ask():
            return None
        if batch is not None:
            sums = add_sums(sums, job.learner.evaluate(batch))
    sums = allreduce_sums(job.communicator, sums | job.telemetry.joules(now=True), "val.sums")
    assert sums["count"] == len(job.val), (sums["count"], len(job.val))
    return sums

"""The training loop, in the order in which things happen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hvdtrain.comm.communicator import Engine
from hvdtrain.comm.sums import allreduce_sums
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.seeds import fold
from hvdtrain.data.sampler import share
from hvdtrain.data.source import Source
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.noise_scale import NoiseScale
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.train.health.monitor import Guard
from hvdtrain.train.input.prefetch import Feed
from hvdtrain.train.progress.train_state import Standing
from hvdtrain.train.progress.triggers import (
    ASK_EVERY,
    epoch_fields,
    evaluation_due,
    judge,
    meets,
    nonfinite_fields,
    step_fields,
    stop_reason,
)
from hvdtrain.train.telemetry.telemetry import Gauges


@dataclass
class Job:
    """The live objects of one rank."""

    config: Config
    engine: Engine
    learner: Learner
    recipe: Recipe
    feed: Feed  # of the training samples
    val: Source
    log: Log
    guard: Guard
    gauges: Gauges
    clock: Callable[[], float] = time.perf_counter  # seconds spent in this job so far, over all its runs
    tell_start: Callable[[int], None] = lambda step: None  # once the first steps are done
    roll_back: Callable[[], None] = lambda: None  # loads the newest checkpoint into every rank
    noise_scale: NoiseScale = field(default_factory=NoiseScale)


def train(job: Job, now: Standing) -> tuple[Standing, str]:
    """Trains until the job is over, or has to stop before: (standing, why). One evaluation per epoch; what is due is written."""
    while not (why := stop_reason(job.config, now) or job.guard.stop):
        now = evaluate_epoch(job, now) if evaluation_due(job.config, now) else train_to_meeting(job, now)
        if job.guard.saver and not job.guard.stop and not evaluation_due(job.config, now):
            job.guard.saver.offer(now, job.learner)  # rank 0 alone writes
    return now, why


def train_to_meeting(job: Job, now: Standing) -> Standing:
    """Steps up to the next one at which all ranks meet: their sums are added up, their statistics settled, their wishes heard."""
    c, p, since, began = job.config, now.progress, zero_sums(), time.perf_counter()
    while True:
        job.guard.pulse.beat("reading samples", p.epoch, p.step)
        job.gauges.turn(p.step)
        hyper, micro = job.feed.take(p)
        job.guard.pulse.beat("step", p.epoch, p.step)
        since = add_sums(since, job.learner.step(micro, hyper, fold(c.seed, p.step)))
        p = p.advance(hyper.batch)
        if meets(c, now, p):
            break
    job.guard.pulse.beat("meeting", p.epoch, p.step)
    job.learner.settle(job.engine)
    sums = allreduce_sums(
        job.engine, since | job.guard.flags(p.step) | job.gauges.flags(), "train.sums"
    )  # the host waits for the device here
    seconds = time.perf_counter() - began
    spent = job.gauges.read(sums, p.step, seconds)
    if job.guard.pulse.patient:
        job.tell_start(p.step)
    job.guard.met(sums)
    after = replace(now, progress=p, seconds=job.clock(), lr=hyper.lr, batch=hyper.batch).burnt(sums)
    if not job.guard.is_finite(after, sums):
        after = job.guard.turned(after, sums, job.roll_back)
        job.log.emit("nonfinite", p.step, **nonfinite_fields(c, after))
        if c.guard.nonfinite == "rollback" or not math.isfinite(sums["loss"]):
            return after  # these sums are of weights that are no more, or are none
    job.guard.check_equal(job.learner, now, after, hyper, bool(sums["save"]) or evaluation_due(c, after))
    job.log.emit("step", p.step, **(step_fields(after, sums, seconds) | spent | job.noise_scale.read(sums)))
    return after.trained(sums, seconds, (job.noise_scale.signal, job.noise_scale.noise))


def evaluate_epoch(job: Job, now: Standing) -> Standing:
    """The epoch's evaluation and its line; unchanged where the job has to stop in the middle of it."""
    val = evaluate(job, now)
    if val is None:
        return now
    done, reached = judge(job.config, now := now.burnt(val), val, job.clock(), job.gauges.kinds)
    fields = epoch_fields(job.config, now, done, val, job.noise_scale.value) | job.gauges.epoch(now, val, done.seconds)
    job.log.emit("epoch", now.progress.step, **fields)
    for target in reached:
        job.log.emit("target", now.progress.step, **target._asdict())
    return done


def evaluate(job: Job, now: Standing) -> Sums | None:
    """Loss, hits and count over the whole validation set, each sample once, whatever the number of ranks; None where the job has to stop.

    The ranks have settled: they met before.
    """
    size, p = job.config.batch.evaluate, now.progress
    start, end = share(len(job.val), job.engine.rank, job.engine.size)
    largest = -(-len(job.val) // job.engine.size)
    turns = range(start, start + largest, size)  # equally many on every rank
    sums = zero_sums()
    for turn, batch in enumerate(job.feed.evaluation(job.val, [np.arange(first, min(first + size, end)) for first in turns])):
        job.guard.pulse.beat("evaluation", p.epoch, p.step)
        job.gauges.energy.keep_up()
        if turn % ASK_EVERY == 0 and job.guard.ask():
            return None
        if batch is not None:
            sums = add_sums(sums, job.learner.evaluate(batch))
    sums = allreduce_sums(job.engine, sums | job.gauges.joules(now=True), "val.sums")
    assert sums["count"] == len(job.val), (sums["count"], len(job.val))
    return sums

"""The training loop, in the order in which things happen."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.sums import allreduce_sums
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.core.seeds import fold
from hvdtrain.data.sampler import share_bounds
from hvdtrain.training.health.monitor import nonfinite_steps
from hvdtrain.training.job import Job
from hvdtrain.training.progress.event_fields import epoch_fields, nonfinite_fields, step_fields
from hvdtrain.training.progress.targets import after_evaluation
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import evaluation_due, is_sync_point, stop_reason
from hvdtrain.training.telemetry import startup

STOP_CHECK_BATCHES = 4  # of an evaluation, between two checks whether to stop: each costs one small allreduce


class Window(NamedTuple):
    """The steps of this rank between two sync points."""

    progress: Progress  # after them
    last: Hyper  # of the last step
    sums: Sums  # of this rank, on the device: nothing has waited for them
    began_s: float  # of time.perf_counter()


def train(job: Job, now: TrainState) -> tuple[TrainState, str]:
    """Trains until the job is over or has to stop early; returns the state and the reason. One evaluation ends each epoch."""
    while not (reason := stop_reason(job.config, now) or job.health.stop_request):
        now = evaluate_epoch(job, now) if evaluation_due(job.config, now) else train_to_sync_point(job, now)
        if not job.health.stop_request and not evaluation_due(job.config, now):
            job.checkpoints.save_if_due(now)
    return now, reason


def train_to_sync_point(job: Job, now: TrainState) -> TrainState:
    """Trains up to the next sync point, and returns the state there."""
    window = run_steps(job, now)
    sums = synchronize(job, window)
    return record(job, now, window, sums, seconds=time.perf_counter() - window.began_s)


def run_steps(job: Job, now: TrainState) -> Window:
    """One step after the other up to the next sync point. The host does not wait for the device here."""
    began_s, p, sums = time.perf_counter(), now.progress, zero_sums()
    while True:
        job.heartbeat.beat("reading samples", p.epoch, p.step)
        job.telemetry.before_step(p.step)
        hyper, micro_batches = job.prefetcher.take(p)
        job.heartbeat.beat("step", p.epoch, p.step)
        sums = add_sums(sums, job.learner.step(micro_batches, hyper, fold(job.config.seed, p.step)))
        p = p.advance(hyper.batch)
        if is_sync_point(job.config, now, p):
            return Window(p, hyper, sums, began_s)


def synchronize(job: Job, window: Window) -> Sums:
    """Makes running statistics, and weights after local steps, equal on all ranks; adds up sums, flags and telemetry over ranks."""
    p = window.progress
    job.heartbeat.beat("synchronizing", p.epoch, p.step)
    job.learner.sync_buffers(job.communicator)
    # flags() decides whether this sync point writes a checkpoint, which save_if_due() then does; core/metrics.py lists all names
    sums = window.sums | job.health.flags(p.step) | job.telemetry.sync_sums()
    return allreduce_sums(job.communicator, sums, "train.sums")  # the host waits for the device here


def record(job: Job, before: TrainState, window: Window, sums: Sums, seconds: float) -> TrainState:
    """The state after a window: emits its events, and acts on flags and on numbers that are not finite. `sums` are of all ranks."""
    p, guard = window.progress, job.config.guard
    telemetry_fields = job.telemetry.sync_fields(sums, p.step, seconds)
    if job.heartbeat.limit == "start_s":  # the first sync point: the start is over
        job.log.emit("started", p.step, **startup.fields(job.heartbeat))
    job.health.after_sync(sums)
    now = replace(before, progress=p, seconds=job.clock(), lr=window.last.lr, batch=window.last.batch).add_energy(sums)

    bad_steps = nonfinite_steps(sums)
    if bad_steps:
        now = job.health.handle_nonfinite(now, bad_steps)
        job.log.emit("nonfinite", p.step, **nonfinite_fields(job.config, now))
        if guard.nonfinite == "rollback" or not math.isfinite(sums["loss"]):
            return now  # the sums are of weights that were replaced, or are no numbers

    before_save = bool(sums["save"]) or evaluation_due(job.config, now)
    job.health.compare_ranks(job.learner, before, now, window.last, before_save=before_save)
    noise_scale = job.noise_scale.update(sums)
    job.log.emit("step", p.step, **step_fields(now, sums, seconds), **telemetry_fields, **noise_scale)
    return now.trained(sums, seconds, (job.noise_scale.signal, job.noise_scale.noise))


def evaluate_epoch(job: Job, now: TrainState) -> TrainState:
    """Evaluates, and ends the epoch; returns the state unchanged where the job has to stop meanwhile."""
    val = evaluate(job, now)
    if val is None:
        return now
    now = now.add_energy(val)
    after, reached = after_evaluation(job.config, now, val, job.clock(), job.telemetry.energy.kinds)
    fields = epoch_fields(job.config, now, after, val, job.noise_scale.value)
    job.log.emit("epoch", now.progress.step, **fields, **job.telemetry.epoch_fields(now, val, after.seconds))
    for target in reached:
        job.log.emit("target", now.progress.step, **target._asdict())
    return after


def evaluate(job: Job, now: TrainState) -> Sums | None:
    """Sums over the whole validation set, each sample once, whatever the number of ranks; None where the job has to stop.

    Buffers are equal on all ranks: a sync point came before.
    """
    size, p, ranks = job.config.batch.evaluate, now.progress, job.communicator.size
    start, end = share_bounds(len(job.val), job.communicator.rank, ranks)
    largest_share = -(-len(job.val) // ranks)
    firsts = range(start, start + largest_share, size)  # equally many batches on every rank; the last one may be empty
    rows = [np.arange(first, min(first + size, end)) for first in firsts]
    sums = zero_sums()
    for index, batch in enumerate(job.prefetcher.evaluation(job.val, rows)):
        job.heartbeat.beat("evaluation", p.epoch, p.step)
        job.telemetry.energy.keep_up()
        if index % STOP_CHECK_BATCHES == 0 and job.health.agree_to_stop():
            return None
        if batch is not None:
            sums = add_sums(sums, job.learner.evaluate(batch))
    sums = allreduce_sums(job.communicator, sums | job.telemetry.energy.read_sums(), "val.sums")
    assert sums["count"] == len(job.val), (sums["count"], len(job.val))
    return sums

"""The training loop, in execution order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.core.metrics import Concatenated, Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper, Progress, fold
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.training.job import Job, StepsSinceSync
from hvdtrain.training.progress.event_fields import epoch_fields, step_fields, target_fields
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import (
    after_evaluation,
    evaluation_due,
    steps_to_sync_point,
    stop_reason,
    time_is_over,
)
from hvdtrain.training.sync_point import act, make_equal

STOP_CHECK_BATCHES = (
    4  # batches of an evaluation between two checks whether to stop: each costs one small allreduce
)


class StepWindow(NamedTuple):
    """The steps of this rank between two sync points."""

    progress: Progress  # after them
    last: Hyper  # hyperparameters of the last step
    sums: Sums  # sums of this rank on the device, not synchronized
    began_s: float  # of time.perf_counter()


def train(job: Job, now: TrainState) -> tuple[TrainState, str]:
    """Trains until the job is over or has to stop early; returns the state and the reason. An
    evaluation ends each epoch."""
    while not (reason := stop_reason(job.config, now) or job.health.stop_request):
        now = (
            evaluate_and_record(job, now)
            if evaluation_due(job.config, now)
            else train_to_sync_point(job, now)
        )
        saves = not job.health.stop_request and not evaluation_due(job.config, now)
        now = job.hooks.with_states(now, before_checkpoint=saves and job.checkpoints.may_save(now))
        if job.memory_copy:
            job.memory_copy.keep(now)
        if saves:
            job.checkpoints.save_if_due(now)
    return now, reason


def train_to_sync_point(job: Job, now: TrainState) -> TrainState:
    """Trains up to the next sync point, and returns the state there."""
    window = run_steps(job, now)
    sums = synchronize(job, window)
    job.unfinished = None
    return record(job, now, window, sums, seconds=time.perf_counter() - window.began_s)


def run_steps(job: Job, now: TrainState) -> StepWindow:
    """Runs steps up to the next sync point. The host does not wait for the device here."""
    # the same names on a rank that runs no step
    no_sums = zero_sums((*job.task.sums, "nonfinite"))
    began_s, sums = job.unfinished or StepsSinceSync(time.perf_counter(), no_sums)
    steps, end = steps_to_sync_point(job.config, job.recipe, now)
    for p in job.learner.own_steps(steps):
        job.heartbeat.beat("reading samples", p.epoch, p.step)
        job.telemetry.before_step(p)
        hyper, micro_batches = job.prefetcher.take(p)
        hyper = job.recipe.after_evaluations(hyper, now.plateau)
        job.heartbeat.beat("step", p.epoch, p.step)
        of_step = job.learner.step(micro_batches, hyper, fold(job.config.seed, p.step))
        sums = add_sums(sums, of_step)
        job.unfinished = StepsSinceSync(began_s, sums)
        job.hooks.after_step(p.advance(hyper.batch), of_step)
    return StepWindow(
        end, job.recipe.after_evaluations(job.recipe.at(steps[-1]), now.plateau), sums, began_s
    )


def synchronize(job: Job, window: StepWindow) -> Sums:
    """Makes running statistics, and weights after local steps, equal on all ranks; sums metrics,
    flags and telemetry over ranks."""
    p = window.progress
    make_equal(job, p)
    job.hooks.exchange()
    # flags() decides whether this sync point writes a checkpoint, which save_if_due() then does;
    # core/metrics.py lists all names
    # rank 0's clock decides for all
    over = job.communicator.rank == 0 and time_is_over(job.config, job.clock())
    sums = (
        window.sums | job.health.flags(p.step) | job.telemetry.sync_sums() | {"over": float(over)}
    )
    return add_up(job, sums, "train.sums")  # the host waits for the device here


def add_up(
    job: Job,
    sums: Sums,
    name: str,
    gathered: Mapping[str, Callable[[Concatenated], float]] | None = None,
) -> Sums:
    """All-reduces the sums. With guard.lost=shrink it also confirms that no rank was lost.
    gathered: see allreduce_sums()."""
    total = allreduce_sums(job.communicator, sums, name, job.task.sums, gathered)
    if job.memory_copy:
        job.memory_copy.confirm()
    return total


def record(
    job: Job, before: TrainState, window: StepWindow, sums: Sums, seconds: float
) -> TrainState:
    """Emits a window's events, acts on flags and on numbers that are not finite, and returns the
    state after it. sums: of all ranks."""
    p = window.progress.end_here() if sums["over"] else window.progress
    telemetry_fields = job.telemetry.sync_fields(sums, p.step, seconds)
    if job.heartbeat.limit == "start_s":  # the first sync point: the start is over
        job.warnings.exchange(job.communicator)
        job.log.emit("started", p.step, **job.telemetry.started_fields(job.heartbeat))
    now = replace(
        before, progress=p, seconds=job.clock(), lr=window.last.lr, batch=window.last.batch
    ).add_energy(sums)
    now = job.hooks.ended(now)
    before_save = bool(sums["save"]) or evaluation_due(job.config, now)
    now = act(job, before, now, window.last, sums, before_save=before_save)
    if not math.isfinite(sums["loss"]) or (
        now.nonfinite > before.nonfinite and job.config.guard.nonfinite == "rollback"
    ):
        # the sums are not finite, or belong to weights that were replaced on all ranks
        return now
    measured = job.noise.update(sums) if job.noise else {}
    fields = step_fields(job.task, now, sums, seconds, job.recipe.epochs)
    fields |= job.throughput.of_device(fields) | job.hooks.fields()
    job.log.emit("step", p.step, **fields, **telemetry_fields, **measured)
    noise = (job.noise.signal, job.noise.noise) if job.noise else now.noise
    return now.trained(sums, seconds, noise)


def evaluate_and_record(job: Job, now: TrainState) -> TrainState:
    """Evaluates, at the end of an epoch or within it; returns the state unchanged if the job has to
    stop meanwhile."""
    val = evaluate(job, now)
    if val is None:
        return now
    job.warnings.exchange(job.communicator)
    now = now.add_energy(val)
    after, reached = after_evaluation(
        job.config, job.task, now, val, job.clock(), job.telemetry.energy_kinds
    )
    after = replace(
        after, plateau=job.recipe.judge(now.plateau, now.progress, after.last, now.better)
    )
    after = job.hooks.after_evaluation(
        after, {metric.name: metric.of(val) for metric in job.task.metrics}
    )
    measured = job.noise.fields if job.noise else {}
    fields = epoch_fields(job.task, now, after, val) | measured
    fields |= job.throughput.of_device(fields) | job.hooks.fields()
    job.log.emit(
        "epoch", now.progress.step, **fields, **job.telemetry.epoch_fields(now, val, after.seconds)
    )
    for gauge in job.telemetry.gauges:
        gauge.emit(now.progress.step)
    for target in reached:
        job.log.emit("target", now.progress.step, **target_fields(target, now.objective))
    job.samples.draw(after)
    return after


def evaluate(job: Job, now: TrainState) -> Sums | None:
    """Sums metrics over the validation set, or evaluate.samples of it, each sample once on any
    number of ranks; None if the job has to stop.

    Buffers are equal on all ranks because a sync point comes before.
    """
    p = now.progress
    sums = zero_sums(job.task.sums)
    data = job.learner.data
    rows = evaluation_batches(len(job.val), job.config.batch.evaluate, data.rank, data.size)
    job.heartbeat.beat("evaluation", p.epoch, p.step)
    with job.learner.averaged():
        for index, batch in enumerate(job.prefetcher.evaluation(job.val, rows)):
            job.heartbeat.beat("evaluation", p.epoch, p.step)
            job.telemetry.keep_up()
            if index % STOP_CHECK_BATCHES == 0 and job.health.agree_to_stop():
                return None
            if batch is not None:
                sums = add_sums(sums, job.learner.evaluate(batch))
    sums = add_up(job, sums | job.telemetry.read_sums(), "val.sums", job.task.gathered)
    assert sums["count"] == len(job.val), (sums["count"], len(job.val))
    return sums

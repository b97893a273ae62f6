"""What a job says before its first step and after its last: what will run, what was reached, how to go on."""

from __future__ import annotations

import math
import platform
import shlex
from pathlib import Path
from typing import Any

from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import share_bounds
from hvdtrain.frameworks.learner import Gpu
from hvdtrain.recipe.summary import batch_summary, lr_summary
from hvdtrain.train.checkpoint.resume import ResumePoint
from hvdtrain.train.input.micro_batches import micro_batches_per_step
from hvdtrain.train.loop import Job
from hvdtrain.train.progress.train_state import Reached, TrainState
from hvdtrain.train.progress.triggers import energy_of
from hvdtrain.train.telemetry import energy
from hvdtrain.version import __version__

SCHEMA = 1  # of the events; docs/events.md


def header(job: Job, why: str, resume_point: ResumePoint) -> list[str]:
    """What will run, in about ten lines."""
    config, communicator, hosts, train_state = job.config, job.communicator, job.health.hosts, resume_point.train_state
    where = ", ".join(f"{host} x {hosts.count(host)}" for host in sorted(set(hosts)))
    counts = f"{job.prefetcher.samples:,} training and {len(job.val):,} validation samples"
    on_each = f"{_share(job.prefetcher.samples, communicator.size)} of an epoch on each rank, " * (communicator.size > 1)
    lines = [
        f"ranks   {communicator.size} ({where}), engine {communicator.name}: {why}",
        f"data    {config.data.name}: {counts}, {on_each}{config.data.sampling} sampling, {job.prefetcher.summary}",
        f"batch   {batch_summary(job.recipe)} over all ranks, {_share(config.batch.size, communicator.size)} on each"
        + " at first" * bool(job.recipe.batch.to),
        f"recipe  {config.optim.name}, {lr_summary(config, job.prefetcher.samples)}",
        f"model   {config.model.name}: {job.learner.describe()}",
        energy.words(job.telemetry.energy.why),
        f"run     {resume_point.run}",
    ]
    if config.norm.kind != "batch":
        high = -(-config.batch.size // communicator.size)
        lines.insert(
            4,
            f"norm    {_norm_words(config, -(-high // micro_batches_per_step(config.batch, high, config.batch.size, config.batch.size)))}",
        )
    if train_state.progress.step:
        lines.append(f"resume  from step {train_state.progress.step}, epoch {train_state.progress.epochs:.2f}")
    if job.health.deadline and job.health.deadline.words:
        lines.append(f"limit   {job.health.deadline.words}")
    return lines + [f"        {note}" for note in resume_point.notes]


def start_fields(job: Job, resume_point: ResumePoint) -> dict[str, Any]:
    """Of the event "start", beside its lines."""
    hosts = job.health.hosts
    return {
        "schema": SCHEMA,
        "version": __version__,
        "ranks": job.communicator.size,
        "hosts": sorted(set(hosts)),
        "host_of_rank": hosts,
        "framework": job.config.framework,
        "model": f"{job.config.model.name}: {job.learner.describe()}",
        "device": _device(job.learner.gpu()),
        "samples": job.prefetcher.samples,
        "val_samples": len(job.val),
        "max_steps": job.config.max_steps,
        "seconds": round(resume_point.train_state.seconds, 3),
        "energy": job.telemetry.energy.why,
        "run": str(resume_point.run),
    }


def end_fields(job: Job, now: TrainState) -> dict[str, Any]:
    """Of the events "end" and "stop", beside their lines: of the whole job, over all its runs."""
    joules, p = energy_of(now, job.telemetry.kinds), now.progress
    trained, trained_s = now.trained_images + now.sums["count"], now.trained_s + now.epoch_s
    return {
        "val_accuracy": now.accuracy,
        "best_accuracy": now.best,
        "best_epoch": now.best_epoch,
        "seconds": round(now.seconds, 3),
        "epochs": p.epochs,
        "images": p.samples,
        "images_per_s": round(trained / trained_s, 1) if trained_s else None,
        "joules": joules,
        **({"joules_per_image": sum(joules.values()) / p.samples} if joules and p.samples else {}),
    }


def done(job: Job, began: TrainState, now: TrainState, why: str, run: Path) -> list[str]:
    """Of a job that is over; it began this time where `began` is."""
    reached = f"validation accuracy {now.accuracy:.4f} after {now.progress.epochs:.2f} epochs and {now.seconds:.1f} s"
    lines = [f"done ({why}): {reached}", *_summary(job, now), *_again(job.config, now, run)]
    if now.progress.step == began.progress.step:
        lines.insert(0, f"nothing was trained: {run} has a job that was over before; another run=, or more epochs= than it has")
    return [*lines, f"report   {shlex.join(['python', '-m', 'hvdtrain', 'report', str(run)])}", f"run folder: {run}"]


def _again(config: Config, now: TrainState, run: Path) -> list[str]:
    """The command that goes on. Code that a run folder names is imported only where the command names it too."""
    if config.model.name.startswith("__main__:"):
        return [f"go on    the same script, with {shlex.join([f'run={run}', _further(config, now)])}"]
    own = [f"model.name={config.model.name}"] * is_dotted(config.model.name)
    own += [f"optim.name={config.optim.name}"] * (is_dotted(config.optim.name) and not config.optim.name.startswith("torch.optim."))
    return [f"go on    {shlex.join(['python', '-m', 'hvdtrain', f'resume={run}', *own, _further(config, now)])}"]


def _further(config: Config, now: TrainState) -> str:
    """What a job that is over needs to hear to go on."""
    if config.max_steps is not None and now.progress.step >= config.max_steps:
        return f"max_steps={2 * config.max_steps}"
    held = config.stop.target_accuracy is not None and now.at_target >= config.stop.patience
    return "stop.target_accuracy=null" if held else f"epochs={2 * max(config.epochs, now.epoch)}"


def stopped(job: Job, now: TrainState, why: str, last: str, run: Path) -> list[str]:
    """Of a job that has to stop before its end; `last` tells of the checkpoint."""
    again = f"the same command goes on, with {shlex.join([f'run={run}', *['resume=auto'] * (job.config.resume == 'no')])}"
    where = f"stopped ({why}) at step {now.progress.step}, epoch {now.progress.epochs:.2f}: {last}"
    return [where, *_summary(job, now), again]


def _summary(job: Job, now: TrainState) -> list[str]:
    fields = end_fields(job, now)
    lines = []
    if not math.isnan(now.best):
        lines.append(f"best     {now.best:.4f} in epoch {now.best_epoch}, last {now.accuracy:.4f}")
    if fields["images_per_s"]:
        lines.append(f"speed    {fields['images_per_s']:,.0f} images/s of training")
    if fields["joules"]:
        kinds = " and ".join({"gpu": "GPUs", "cpu": "processors"}[kind] for kind in fields["joules"])
        lines.append(f"energy   {sum(fields['joules'].values()):,.0f} J of {kinds}, {fields['joules_per_image']:.4g} J per image")
    return lines + [reached_words(one) for one in now.reached]


def reached_words(one: Reached) -> str:
    """target   0.95 after 2.1 s, 3.00 epochs, 4,352 images, 140 J"""
    joules = "" if one.joules is None else f", {one.joules:,.0f} J"
    return f"target   {one.target:g} after {one.seconds:.1f} s, {one.epochs:.2f} epochs, {one.images:,} images{joules}"


def _device(gpu: Gpu | None) -> str:
    """The product that rank 0 computes on."""
    if gpu:
        return gpu.name
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine()
    )


def _share(count: int, size: int) -> str:
    """How many of `count` a rank has: 359 or 360."""
    parts = [b - a for a, b in (share_bounds(count, rank, size) for rank in (0, size - 1))]
    return f"{max(parts):,}" if len(set(parts)) == 1 else f"{min(parts):,} or {max(parts):,}"


def _norm_words(config: Config, samples: int) -> str:
    """Over what batch norm takes its statistics; `samples` of one forward pass."""
    if config.norm.kind == "sync":
        return "batch norm over the samples of all ranks"
    small = f": a pass has {samples}, so each is a ghost of its own" if config.norm.ghost >= samples else ""
    return f"batch norm over ghosts of {config.norm.ghost} samples{small}"

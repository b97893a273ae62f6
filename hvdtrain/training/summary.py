"""The events start, end and stop of a job, and their lines: what will run, what was reached, how to resume it."""

from __future__ import annotations

import math
import platform
import shlex
from pathlib import Path
from typing import Any

from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import share_bounds
from hvdtrain.errors import DONE, REQUEUE
from hvdtrain.frameworks.learner import Gpu
from hvdtrain.recipe.summary import batch_summary, lr_summary
from hvdtrain.training.input.micro_batches import micro_batches_per_step
from hvdtrain.training.job import Job
from hvdtrain.training.progress.event_fields import job_energy
from hvdtrain.training.progress.train_state import Reached, TrainState
from hvdtrain.training.start import Start
from hvdtrain.training.telemetry import energy
from hvdtrain.version import __version__

SCHEMA = 1  # of the events; docs/events.md


def emit_start(job: Job, start: Start, engine_reason: str) -> None:
    """The event "start"; engine_reason: why the communicator is this one."""
    job.log.emit(
        "start",
        start.train_state.progress.step,
        lines=header(job, start, engine_reason),
        digest=start.digest,
        engine=job.communicator.name,
        parameters=start.weights,
        schema=SCHEMA,
        version=__version__,
        ranks=job.communicator.size,
        hosts=sorted(set(job.hosts)),
        host_of_rank=job.hosts,
        framework=job.config.framework,
        model=f"{job.config.model.name}: {job.learner.describe()}",
        device=_device(job.learner.gpu()),
        samples=job.prefetcher.samples,
        val_samples=len(job.val),
        max_steps=job.config.max_steps,
        seconds=round(start.train_state.seconds, 3),
        energy=job.telemetry.energy.reasons,
        run=str(start.run),
    )


def emit_end(job: Job, start: Start, now: TrainState, reason: str) -> None:
    """The event "end", of a job that is over."""
    lines = done(job, start.train_state, now, reason, start.run)
    job.log.emit("end", now.progress.step, reason=reason, exit_code=DONE, lines=lines, **end_fields(job, now))


def emit_stop(job: Job, start: Start, now: TrainState, reason: str, failure: str) -> None:
    """The event "stop", of a job that had to stop before its end; failure: why its last checkpoint is not written, or empty."""
    lines = stopped(job, now, reason, failure, start.run)
    job.log.emit("stop", now.progress.step, reason=reason, exit_code=REQUEUE, lines=lines, **end_fields(job, now))


def header(job: Job, start: Start, engine_reason: str) -> list[str]:
    """What will run, in about ten lines."""
    config, ranks = job.config, job.communicator.size
    where = ", ".join(f"{host} x {job.hosts.count(host)}" for host in sorted(set(job.hosts)))
    counts = f"{job.prefetcher.samples:,} training and {len(job.val):,} validation samples"
    of_each = f"{_share(job.prefetcher.samples, ranks)} of an epoch on each rank, " if ranks > 1 else ""
    at_first = " at first" if job.recipe.batch.to else ""
    lines = [
        f"ranks   {ranks} ({where}), engine {job.communicator.name}: {engine_reason}",
        f"data    {config.data.name}: {counts}, {of_each}{config.data.sampling} sampling, {job.prefetcher.summary}",
        f"batch   {batch_summary(job.recipe)} over all ranks, {_share(config.batch.size, ranks)} on each{at_first}",
        f"recipe  {config.optim.name}, {lr_summary(config, job.prefetcher.samples)}",
    ]
    if config.norm.kind != "batch":
        largest_share = -(-config.batch.size // ranks)
        samples = -(-largest_share // micro_batches_per_step(config.batch, largest_share, config.batch.size, config.batch.size))
        lines.append(f"norm    {_norm_summary(config, samples)}")
    lines += [
        f"model   {config.model.name}: {job.learner.describe()}",
        energy.summary(job.telemetry.energy.reasons),
        f"run     {start.run}",
    ]
    progress = start.train_state.progress
    if progress.step:
        lines.append(f"resume  from step {progress.step}, epoch {progress.epochs:.2f}")
    if job.health.deadline and job.health.deadline.reason:
        lines.append(f"limit   {job.health.deadline.reason}")
    return lines + [f"        {note}" for note in start.notes]


def end_fields(job: Job, now: TrainState) -> dict[str, Any]:
    """Of the events "end" and "stop", beside their lines: of the whole job, over all its runs."""
    joules, p = job_energy(now, job.telemetry.energy.kinds), now.progress
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


def done(job: Job, before: TrainState, now: TrainState, reason: str, run: Path) -> list[str]:
    """Of a job that is over; `before`: where this run of it began."""
    reached = f"validation accuracy {now.accuracy:.4f} after {now.progress.epochs:.2f} epochs and {now.seconds:.1f} s"
    lines = [f"done ({reason}): {reached}", *_results(job, now), *_resume_command(job.config, now, run)]
    if now.progress.step == before.progress.step:
        lines.insert(0, f"nothing was trained: {run} has a job that was over before; another run=, or more epochs= than it has")
    return [*lines, f"report   {shlex.join(['python', '-m', 'hvdtrain', 'report', str(run)])}", f"run folder: {run}"]


def _resume_command(config: Config, now: TrainState, run: Path) -> list[str]:
    """The command that trains on. Code that a run folder names is imported only where the command names it too."""
    if config.model.name.startswith("__main__:"):
        return [f"resume   the same script, with {shlex.join([f'run={run}', _further(config, now)])}"]
    command = ["python", "-m", "hvdtrain", f"resume={run}"]
    if is_dotted(config.model.name):
        command.append(f"model.name={config.model.name}")
    if is_dotted(config.optim.name) and not config.optim.name.startswith("torch.optim."):
        command.append(f"optim.name={config.optim.name}")
    return [f"resume   {shlex.join([*command, _further(config, now)])}"]


def _further(config: Config, now: TrainState) -> str:
    """The argument that extends a job that is over."""
    if config.max_steps is not None and now.progress.step >= config.max_steps:
        return f"max_steps={2 * config.max_steps}"
    if config.stop.target_accuracy is not None and now.at_target >= config.stop.patience:
        return "stop.target_accuracy=null"
    return f"epochs={2 * max(config.epochs, now.epoch)}"


def stopped(job: Job, now: TrainState, reason: str, failure: str, run: Path) -> list[str]:
    """Of a job that has to stop before its end; failure: why its last checkpoint is not written, or empty."""
    step = now.progress.step
    checkpoint = (
        f"no checkpoint of step {step}: {failure}; older ones are there" if failure else f"the checkpoint of step {step} is written"
    )
    arguments = [f"run={run}"] if job.config.resume != "no" else [f"run={run}", "resume=auto"]
    where = f"stopped ({reason}) at step {step}, epoch {now.progress.epochs:.2f}: {checkpoint}"
    return [where, *_results(job, now), f"the same command resumes the job, with {shlex.join(arguments)}"]


def _results(job: Job, now: TrainState) -> list[str]:
    fields = end_fields(job, now)
    lines = []
    if not math.isnan(now.best):
        lines.append(f"best     {now.best:.4f} in epoch {now.best_epoch}, last {now.accuracy:.4f}")
    if fields["images_per_s"]:
        lines.append(f"speed    {fields['images_per_s']:,.0f} images/s of training")
    if fields["joules"]:
        kinds = " and ".join({"gpu": "GPUs", "cpu": "processors"}[kind] for kind in fields["joules"])
        lines.append(f"energy   {sum(fields['joules'].values()):,.0f} J of {kinds}, {fields['joules_per_image']:.4g} J per image")
    return lines + [reached_line(one) for one in now.reached]


def reached_line(one: Reached) -> str:
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
    (first, first_end), (last, last_end) = share_bounds(count, 0, size), share_bounds(count, size - 1, size)
    smallest, largest = sorted((first_end - first, last_end - last))
    return f"{largest:,}" if largest == smallest else f"{smallest:,} or {largest:,}"


def _norm_summary(config: Config, samples: int) -> str:
    """Over what batch norm takes its statistics; `samples` of one forward pass."""
    if config.norm.kind == "sync":
        return "batch norm over the samples of all ranks"
    small = f": a pass has {samples}, so each is a ghost of its own" if config.norm.ghost >= samples else ""
    return f"batch norm over ghosts of {config.norm.ghost} samples{small}"

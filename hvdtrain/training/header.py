"""The events start, end and stop of a job, and their lines: the plan, the results and how to
resume."""

from __future__ import annotations

import math
import platform
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.comm.mesh import AXES, coordinates
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.core.extras import shows_run
from hvdtrain.core.metrics import Metric
from hvdtrain.core.process import command_line, path_argument
from hvdtrain.data.sampler import share_bounds
from hvdtrain.errors import DONE, REQUEUE, short
from hvdtrain.events import redaction
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.by_name import decay
from hvdtrain.frameworks.learner import Gpu
from hvdtrain.recipe.summary import batch_summary, lr_summary, noise_summary
from hvdtrain.tasks.task import Task, samples_of
from hvdtrain.training.build import job_transform
from hvdtrain.training.checkpoint.changes import PLACE, flat, further, resume_command
from hvdtrain.training.input import micro_batches_per_step
from hvdtrain.training.job import Job
from hvdtrain.training.job_memory import line as memory_line
from hvdtrain.training.progress.event_fields import job_energy
from hvdtrain.training.progress.train_state import Reached, TrainState
from hvdtrain.training.progress.triggers import stop_seconds
from hvdtrain.training.start import Start
from hvdtrain.version import __version__

_MOST_HOSTS = 16  # named in the header
SCHEMA = 2  # version of the events; see docs/events.md
CLASS_NAMES_WIDTH = 40  # letters of class names in the header


def emit_start(job: Job, start: Start, engine_reason: str, environment: Mapping[str, Any]) -> None:
    """Emits the event "start". engine_reason: why this engine was chosen; environment: of rank
    0."""
    job.log.emit(
        "start",
        start.train_state.progress.step,
        lines=header(job, start, engine_reason),
        digest=start.digest,
        **fields_of_ranks(job.config, job.communicator.name, job.hosts),
        parameters=start.weights,
        framework=job.config.framework,
        model=f"{job.config.model.name}: {job.learner.describe()}",
        device=_device(job.learner.gpu()),
        **job.throughput.start_fields(),
        samples=job.prefetcher.samples,
        val_samples=job.val_samples,
        task=job.task.name,
        objective=job.task.objective,
        unit=samples_of(job.task),
        counts="tokens" if "tokens" in job.task.sums else "samples",
        metrics={metric.name: metric_fields(metric) for metric in job.task.metrics},
        shape=job.task.sizes.get("shape"),
        classes=job.task.sizes.get("classes"),
        class_names=job.config.data.class_names,
        max_steps=job.config.stop.steps,
        max_seconds=stop_seconds(job.config),
        seconds=round(start.train_state.seconds, 3),
        **job.telemetry.start_fields(),
        run=str(start.run),
        resumed_from=start.resumed_from,
        config=redaction.redact(flat(job.config.model_dump(exclude=set(PLACE)))),
        changed={change.key: [change.before, change.now] for change in start.changes},
        environment=environment,
    )


def emit_end(job: Job, start: Start, now: TrainState, reason: str, memory: dict[str, Any]) -> None:
    """Emits the event "end" of a complete job. memory: fields of its memory use."""
    lines = done(job, start.train_state, now, reason, start.run, memory)
    job.log.emit(
        "end",
        now.progress.step,
        reason=reason,
        exit_code=DONE,
        lines=lines,
        **end_fields(job, now),
        **memory,
    )


def emit_stop(
    job: Job, start: Start, now: TrainState, reason: str, failure: str, memory: dict[str, Any]
) -> None:
    """Emits the event "stop" of a job that had to stop early. failure: why its last checkpoint was
    not written, or empty."""
    lines = stopped(job, now, reason, failure, start.run, memory)
    job.log.emit(
        "stop",
        now.progress.step,
        reason=reason,
        exit_code=REQUEUE,
        lines=lines,
        **end_fields(job, now),
        **memory,
    )


def _ranks_of_hosts(hosts: Sequence[str]) -> str:
    """Formats ranks per host: n1 x 8, n2 x 8."""
    ranks = Counter(hosts)
    shown = [f"{host} x {ranks[host]}" for host in sorted(ranks)[:_MOST_HOSTS]]
    return ", ".join(shown) + (
        f" and {len(ranks) - _MOST_HOSTS:,} more hosts" if len(ranks) > _MOST_HOSTS else ""
    )


def fields_of_ranks(config: Config, engine: str, hosts: list[str]) -> dict[str, Any]:
    """Returns fields of the event "start", for the trainer and for custom loops. hosts: of each
    rank."""
    whole = {
        "engine": engine,
        "schema": SCHEMA,
        "version": __version__,
        "ranks": len(hosts),
        "hosts": sorted(set(hosts)),
    }
    return {**whole, "host_of_rank": hosts, **_mesh_fields(config.parallel, len(hosts))}


def _mesh_fields(parallel: ParallelConfig, ranks: int) -> dict[str, Any]:
    """Returns fields of the event "start": the number of ranks along each axis, and [stage, data,
    tensor] of each rank if several ranks share one model."""
    readers = ranks // parallel.ranks
    sizes = (parallel.pipe_ranks, readers, parallel.part_ranks)
    axes = dict(zip(AXES, sizes, strict=True))
    if parallel.ranks == 1:
        return {"mesh": axes}
    return {
        "mesh": axes,
        "coordinates_of_rank": [
            list(coordinates(rank, readers, parallel.part_ranks)) for rank in range(ranks)
        ],
    }


def lines_of_ranks(
    config: Config, engine: str, hosts: Sequence[str], engine_reason: str
) -> list[str]:
    """Returns the first lines of the header, for the trainer and for custom loops. engine_reason:
    why this engine was chosen."""
    of_features = [line for feature in FEATURES for line in feature.ranks_lines(config, hosts)]
    return [
        f"ranks   {len(hosts)} ({_ranks_of_hosts(hosts)}), engine {engine}: {engine_reason}",
        *of_features,
    ]


def header(job: Job, start: Start, engine_reason: str) -> list[str]:
    """Describes what will run, in about ten lines."""
    config = job.config
    gauges = job.telemetry.gauges
    readers = job.config.readers(job.communicator.size)
    counts = f"{job.prefetcher.samples:,} training and {job.val_samples:,} validation samples"
    if config.evaluate.samples is not None:
        counts += f" ({len(job.val):,} of them in an evaluation)"
    counts += "".join(feature.count_words(config) for feature in FEATURES)
    readers_are = [feature.reader for feature in FEATURES if feature.on(config) and feature.reader]
    reader = next(iter(readers_are), "rank")
    of_each = (
        f"{_share(job.prefetcher.samples, readers)} of an epoch on each {reader}, "
        if readers > 1
        else ""
    )
    at_first = " at first" if job.recipe.batch.to else ""
    divided = f"over all {reader}s, {_share(config.batch.size, readers)} on each{at_first}"
    lines = [
        *lines_of_ranks(config, job.communicator.name, job.hosts, engine_reason),
        f"data    {config.data.name}: {counts}, "
        f"{job.task.summary}{first_names(config.data.class_names)}",
        f"        {of_each}{config.data.sampling} sampling, "
        f"{_reading(job, readers)}{job.prefetcher.summary}",
        *inputs_lines(job.task, config),
        f"batch   {batch_summary(job.recipe)} "
        f"{f'of one {reader} in each step' if config.is_asynchronous else divided}",
        f"recipe  {config.optim.name}, "
        f"{_own_rate(config)}{lr_summary(config, job.prefetcher.samples, job.task.sizes.get('context'))}",  # noqa: E501
    ]
    if (why := config.batch.origin("micro")).startswith("auto"):
        lines.insert(-1, f"        batch.micro={config.batch.micro} ({why})")
    if noise := noise_summary(config):
        lines.append(f"        {noise}")
    lines += _decay_of_class(config)
    lines += [
        f"        {line}"
        for feature in FEATURES
        for line in feature.recipe_lines(config, job.recipe, job.prefetcher.samples)
    ]
    if config.norm.kind != "batch":
        largest_share = -(-config.batch.size // readers)
        samples = -(
            -largest_share
            // micro_batches_per_step(
                config.batch, largest_share, config.batch.size, config.batch.size
            )
        )
        lines.append(f"norm    {_norm_summary(config, samples)}")
        if config.norm.kind == "sync" and readers > 1 and _drops(job.learner.module):
            lines.append(
                "        dropout draws on each rank for itself, so results depend on the number "
                "of ranks; without it they do not"
            )
    lines += [
        f"model   {config.model.name}: {job.learner.describe()}",
        *job.hooks.summary(),
        *([f"memory  {job.memory.note}"] if job.memory and job.memory.note else []),
        *job.throughput.header_lines([word for each in gauges for word in each.device_words()]),
        *(line for gauge in gauges for line in gauge.header_lines()),
        f"run     {start.run}",
    ]
    progress = start.train_state.progress
    if progress.step:
        lines.append(f"resume  from step {progress.step}, epoch {progress.epochs:.2f}")
    if job.health.deadline and job.health.deadline.reason:
        lines.append(f"limit   {job.health.deadline.reason}")
    return lines + [f"        {note}" for note in start.notes]


def inputs_lines(task: Task, config: Config) -> list[str]:
    """Returns lines about the transform of x."""
    transform = job_transform(task, config)
    return [] if transform is None else [f"inputs  {transform.summary}"]


def end_fields(job: Job, now: TrainState) -> dict[str, Any]:
    """Returns fields of the events "end" and "stop", for the whole job over all its runs."""
    joules = job_energy(now, job.telemetry.energy_kinds)
    p = now.progress
    trained = now.trained_images + now.trained_samples
    trained_s = now.trained_s + now.epoch_s
    # the unit of a sample's rate; with padding, tokens are not counted over the job
    tokens = job.task.sample_weight if "tokens" in job.task.sums else None
    rates = {"samples_per_s": round(trained / trained_s, 1) if trained_s else None}
    if tokens:
        rates["tokens_per_s"] = round(trained * tokens / trained_s, 1) if trained_s else None
    return {
        f"val_{now.objective}": now.last,
        f"best_{now.objective}": now.best,
        "best_epoch": now.best_epoch,
        "seconds": round(now.seconds, 3),
        "epochs": p.epochs,
        "samples": p.samples,
        **rates,
        **job.throughput.of_device(rates),
        "joules": joules,
        **({"joules_per_sample": sum(joules.values()) / p.samples} if joules and p.samples else {}),
    }


def done(
    job: Job, before: TrainState, now: TrainState, reason: str, run: Path, memory: dict[str, Any]
) -> list[str]:
    """Returns the last lines of a complete job. before: the state at which this run began."""
    reached = (
        f"validation {now.objective} {now.last:.4f} after {now.progress.epochs:.2f} epochs and "
        f"{now.seconds:.1f} s"
    )
    results = _results(job, now, memory)
    goes_on = further(job.config, now)
    lines = [f"done ({reason}): {reached}"]
    if now.progress.step == before.progress.step:
        lines.insert(
            0,
            f"nothing to do: run {run} is already complete. Use another run=, or resume it with "
            f"{' '.join(goes_on)}",
        )
        results = [line for line in results if not line.startswith("speed")]  # of other ranks
    lines += [*results, f"resume   {resume_command(job.config, run, *goes_on)}"]
    lines += [f"{name:8} {command_line(name, path_argument(run))}" for name in shows_run()]
    return [*lines, f"run folder: {run}"]


def stopped(
    job: Job, now: TrainState, reason: str, failure: str, run: Path, memory: dict[str, Any]
) -> list[str]:
    """Returns the last lines of a job that has to stop early. failure: why its last checkpoint was
    not written, or empty."""
    step = now.progress.step
    checkpoint = (
        f"no checkpoint of step {step}: {failure}; older ones are there"
        if failure
        else f"the checkpoint of step {step} is written"
    )
    config = job.config
    if config.resume == "no":
        further_words = f", with {shlex.join([f'run={run}', 'resume=auto'])}"
    elif config.resume == "auto" and config.run is None:
        further_words = f", with {shlex.join([f'run={run}'])}"
    else:
        further_words = ""  # the command names the folder
    where = f"stopped ({reason}) at step {step}, epoch {now.progress.epochs:.2f}: {checkpoint}"
    return [where, *_results(job, now, memory), f"the same command resumes the job{further_words}"]


def _results(job: Job, now: TrainState, memory: dict[str, Any]) -> list[str]:
    fields = end_fields(job, now)
    unit = samples_of(job.task)
    lines = []
    if not math.isnan(now.best):
        lines.append(f"best     {now.best:.4f} in epoch {now.best_epoch}, last {now.last:.4f}")
        if job.config.stop.restore_best:
            whose = "the script's model, export" if job.config.model.given else "export"
            lines.append(
                f"weights  of the best evaluation (stop.restore_best): {whose}, evaluate, predict "
                "and sample have these"
            )
    if fields["samples_per_s"]:
        tokens = f"{fields['tokens_per_s']:,.0f} tokens/s, " if fields.get("tokens_per_s") else ""
        operations = job.throughput.words(fields)
        lines.append(
            f"speed    {tokens}{fields['samples_per_s']:,.0f} {unit}/s of training"
            + (f", {operations}" if operations else "")
        )
    lines += [line for gauge in job.telemetry.gauges for line in gauge.lines()]
    if memory:
        lines.append(memory_line(memory))
    if fields["joules"]:
        kinds = " and ".join(
            {"gpu": "GPUs", "cpu": "processors"}[kind] for kind in fields["joules"]
        )
        of_each = f"{fields['joules_per_sample']:.4g} J per {unit.removesuffix('s')}"
        lines.append(f"energy   {sum(fields['joules'].values()):,.0f} J of {kinds}, {of_each}")
    return lines + [reached_line(one, unit) for one in now.reached]


def reached_line(one: Reached, unit: str) -> str:
    """Formats a reached target: target 0.95 after 2.1 s, 3.00 epochs, 4,352 images, 140 J."""
    joules = "" if one.joules is None else f", {one.joules:,.0f} J"
    return (
        f"target   {one.target:g} after {one.seconds:.1f} s, {one.epochs:.2f} epochs, "
        f"{one.images:,} {unit}{joules}"
    )


def _device(gpu: Gpu | None) -> str:
    """Returns the name of rank 0's device."""
    if gpu:
        return gpu.name
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )


def metric_fields(metric: Metric) -> dict[str, Any]:
    """Returns how a metric is displayed, for readers of the events."""
    return {"better": metric.better, "column": metric.short_name, "percent": metric.percent}


def first_names(names: Sequence[str] | None) -> str:
    """Returns the first class names, to follow the number of classes: `: T-shirt/top, Trouser,
    Pullover, Dress, ...`; empty if classes have no names."""
    first = ""
    for name in map(short, names or ()):
        if len(first) + len(name) > CLASS_NAMES_WIDTH:
            first += ", ..." if first else ": ..."
            break
        first += f", {name}" if first else f": {name}"
    return first


def _reading(job: Job, readers: int) -> str:
    words = [feature.reading_words(job.config, job.recipe, readers) for feature in FEATURES]
    return "".join(f"{one}, " for one in words if one)


def _share(count: int, size: int) -> str:
    """Returns a rank's share of `count`, such as "359 or 360"."""
    (first, first_end), (last, last_end) = (
        share_bounds(count, 0, size),
        share_bounds(count, size - 1, size),
    )
    smallest, largest = sorted((first_end - first, last_end - last))
    return f"{largest:,}" if largest == smallest else f"{smallest:,} or {largest:,}"


def _own_rate(config: Config) -> str:
    """Returns the factor text of the recipe's rate, if a script's optimizer has its own rate."""
    return (
        "its own rate times " if config.optim.given is not None and config.optim.given.unset else ""
    )


def _decay_of_class(config: Config) -> list[str]:
    """Returns a line about the weight decay of a class of torch.optim, whose default differs
    between classes."""
    found = decay(config) if plugins.is_dotted(config.optim.name) else None
    if found is None:
        return []
    if config.optim.weight_decay is None:
        return [
            f"        weight decay {found:g} of all parameters, the default of {config.optim.name}"
        ]
    but = (
        " but for norms and biases" if found and config.optim.exclude == "norms_and_biases" else ""
    )
    return [f"        weight decay {found:g}{but}, optim.weight_decay"]


def _drops(module: Any) -> bool:
    """Whether a torch model has layers that are random in training."""
    layers = module.modules() if hasattr(module, "modules") else ()
    shares = [getattr(layer, "p", 0) for layer in layers if "Dropout" in type(layer).__name__]
    return any(isinstance(p, (int, float)) and p > 0 for p in shares)


def _norm_summary(config: Config, samples: int) -> str:
    """Describes the samples that batch norm computes statistics over. samples: in one forward
    pass."""
    if config.norm.kind == "sync":
        return "batch norm over the samples of all ranks"
    small = (
        f": a pass has {samples}, so each is a ghost of its own"
        if config.norm.ghost >= samples
        else ""
    )
    return f"batch norm over ghosts of {config.norm.ghost} samples{small}"

"""All features, in the order in which conflicts are checked: the first conflict is reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.config import read
from hvdtrain.config.exclusion import Exclusion, as_yaml, options, value_of
from hvdtrain.config.read import Assignment
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.features import (
    comm,
    data,
    frameworks,
    log,
    lost,
    optim,
    passes,
    reduce,
    shards,
    tasks,
)
from hvdtrain.features.job_feature import JobFeature, PlannedJob, TaskConflict
from hvdtrain.features.of_extras import with_features_of_extras
from hvdtrain.recipe.conflicts import KEYS_OF_SCHEDULES, recipe_conflicts, unread_recipe_keys

if TYPE_CHECKING:
    from hvdtrain.tasks.task import Task


def _plain(
    key: str,
    usual: Any,
    *examples: str,
    without: tuple[Exclusion, ...] = (),
    other_keys: tuple[str, ...] = (),
    gauge: str = "",
    is_extra: bool = False,
    extra_values: tuple[str, ...] = (),
    excludes_tasks: tuple[TaskConflict, ...] = (),
) -> JobFeature:
    """Returns a feature that is on if its key differs from the usual value; without, other_keys,
    gauge, is_extra, extra_values and excludes_tasks as in JobFeature."""

    def on(config: Config) -> bool:
        return bool(value_of(config, key) != usual)

    return JobFeature(
        key=key,
        on=on,
        examples=examples,
        without=without,
        other_keys=other_keys,
        gauge=gauge,
        is_extra=is_extra,
        extra_values=extra_values,
        excludes_tasks=excludes_tasks,
        off=f"{key}={as_yaml(usual)}" if is_extra or extra_values else "",
    )


_MIXED_LABELS = (
    "{key} mixes the labels of classes, which task.name={config.task.name} does not have"
)
PLAIN = (  # these exclude nothing themselves: other features list what they exclude
    _plain(
        "norm.kind",
        "batch",
        "norm.kind=ghost norm.ghost=3",
        without=options("norm.kind=ghost", {"norm.ghost": 16, "norm.statistics": "sequential"}),
        extra_values=("norm.kind=ghost",),
    ),
    _plain(
        "speed.precision",
        "fp32",
        "speed.precision=bf16",
        "speed.precision=fp16",
        gauge="hvdtrain.training.telemetry.loss_scale:loss_scale_gauge",
    ),
    _plain("speed.compile", "none", "speed.compile=default"),
    _plain("speed.peak_tflops", None, "speed.peak_tflops=0.5", is_extra=True),
    _plain("speed.channels_last", None, "speed.channels_last=true"),
    _plain("comm.bind", "none", "comm.bind=numa"),
    _plain("optim.clip_norm", None, "optim.clip_norm=0.05"),
    _plain(
        "recipe.growth",
        "none",
        "recipe.growth=milestones recipe.grow_at=[2steps] recipe.grow_to=[80]",
        other_keys=("recipe.batch_max", "recipe.grow_at", "recipe.grow_to"),
    ),
    _plain(
        "recipe.schedule",
        "constant",
        "recipe.schedule=plateau",
        other_keys=KEYS_OF_SCHEDULES,
    ),
    _plain("recipe.gradient_noise", 0.0, "recipe.gradient_noise=0.01"),
    _plain("recipe.sample_noise", 0.0, "recipe.sample_noise=0.5 optim.base_batch=6"),
    _plain("data.sampling", "global", "data.sampling=partition"),
    _plain("data.shift", None, "data.shift=1 task.name=regression", is_extra=True),
    _plain(
        "augment.mixup",
        0.0,
        "augment.mixup=0.3",
        excludes_tasks=(
            TaskConflict(
                lambda task: "classes" not in task.sizes and bool(task.masks),
                _MIXED_LABELS,
                fix="augment.mixup=0; or augment.cutmix, which pastes boxes of images with their "
                "masks",
            ),
            TaskConflict(
                lambda task: "classes" not in task.sizes, _MIXED_LABELS, fix="augment.mixup=0"
            ),
        ),
    ),
    _plain(
        "augment.cutmix",
        0.0,
        "augment.cutmix=1.0",
        excludes_tasks=(
            TaskConflict(
                lambda task: "classes" not in task.sizes and not task.masks,
                _MIXED_LABELS,
                fix="augment.cutmix=0",
            ),
        ),
    ),
    _plain("augment.flip", False, "augment.flip=true", "augment.flip=alternating"),
    _plain("augment.resized_crop", 0.0, "augment.resized_crop=0.5"),
    _plain("augment.cutout", 0, "augment.cutout=2"),
    _plain("augment.erase", 0.0, "augment.erase=0.5", is_extra=True),
    _plain("model.freeze", [], 'model.freeze=["*bias"]'),
    _plain("evaluate.every_steps", None, "evaluate.every_steps=2"),
    _plain("evaluate.samples", None, "evaluate.samples=5"),
    _plain(
        "guard.nonfinite",
        "stop",
        "guard.nonfinite=skip",
        "guard.nonfinite=rollback",
        without=options("guard.nonfinite=skip or rollback", {"guard.nonfinite_limit": 5}),
    ),
    _plain(
        "checkpoint.every",
        None,
        "checkpoint.every=auto",
        without=options("checkpoint.every=auto", {"guard.mtbf_hours": 24.0}),
        is_extra=True,
    ),
    _plain(
        "stop.patience",
        None,
        "stop.patience=9",
        without=options("stop.patience", {"stop.min_delta": 0.01}, fix="stop.patience=5"),
    ),
    _plain("checkpoint.keep_best", 0, "checkpoint.keep_best=1"),
    _plain("log.step_times", False, "log.step_times=true"),
)

OF_HVDTRAIN: tuple[JobFeature, ...] = (
    frameworks.JAX,
    frameworks.NUMPY,
    frameworks.KERAS,
    frameworks.DEVICES,
    reduce.DISTRIBUTED_OPTIMIZER,
    reduce.DDP,
    reduce.BUCKET,
    reduce.COMPRESSION,
    reduce.ADASUM,
    reduce.LOCAL_SGD,
    shards.SHARDS,
    optim.MUON,
    reduce.TUNE,
    comm.HIERARCHICAL,
    comm.CYCLE,
    comm.FUSION,
    comm.DEVICE_MEMORY,
    optim.USER_OPTIMIZER,
    log.NOISE_SCALE,
    log.SAMPLES,
    log.HOOKS,
    data.READERS,
    data.BLOCKS,
    data.SAMPLE_WEIGHTS,
    data.PAD,
    data.TEXTS,
    data.PACK,
    data.BUCKETS,
    data.INPUTS,
    data.VAL_SHARE,
    data.SHARE,
    data.CROP,
    data.RAND_AUGMENT,
    data.COLOR_JITTER,
    optim.EMA,
    data.VIEWS,
    optim.GROUPS,
    optim.THAW,
    optim.LORA,
    optim.WEIGHTS,
    passes.RECOMPUTE,
    lost.LOST,
    lost.SHRINK,
    passes.MICRO,
    passes.SYNC_NORM,
    *PLAIN,
    tasks.REGRESSION,
    tasks.LANGUAGE,
    tasks.LOSS_ON,
    tasks.IGNORED_LABEL,
    tasks.CLASS_METRICS,
    tasks.GAPS,
    tasks.USER_TASK,
    tasks.LOG_TARGETS,
    tasks.STOP_TARGET,
)
FEATURES = with_features_of_extras(OF_HVDTRAIN)


def configure(
    path: str | None, arguments: Sequence[str], resumed: Sequence[Assignment] | None = None
) -> Config:
    """Reads the configuration as config.read.configure() does, without the keys that only the
    record of a run sets and that have no effect in this job."""
    return read.configure(path, arguments, resumed, unread_keys)


def unread_keys(config: Config) -> Iterator[str]:
    """Yields keys that are set but have no effect without another key."""
    yield from unread_recipe_keys(config)
    for feature in FEATURES:
        yield from feature.unread_keys(config)


def conflicts_of(job: PlannedJob) -> Iterator[UserError]:
    """Yields every conflict of a job: first of its recipe, then of its features in order, then of
    the number of ranks, then of extras that are not installed.

    The number of ranks comes so late so that plan has one message for all its rows.
    """
    yield from recipe_conflicts(job.config)
    for feature in (*FEATURES, comm.RANKS):
        yield from feature.conflicts(job)
    for feature in FEATURES:
        yield from feature.missing(job)


def task_conflicts_of(config: Config, task: Task) -> Iterator[UserError]:
    """Yields every conflict of a job's features with its task, in order."""
    for feature in FEATURES:
        yield from feature.task_conflicts(config, task)

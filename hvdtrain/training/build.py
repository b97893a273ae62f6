"""Builds the objects of a job from its configuration: communicator, learner, recipe, and the task,
checked."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.engines import EngineChoice, installed_here, needed_features, select_engine
from hvdtrain.comm.launcher_variables import Placement, take_part_of_gpu
from hvdtrain.comm.rendezvous import allow_open_files
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementing_module
from hvdtrain.core.metrics import NOISE_SCALE_KEYS
from hvdtrain.data.images.averaging import averaging_of
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.errors import UserError, short
from hvdtrain.features.every_feature import FEATURES, task_conflicts_of
from hvdtrain.frameworks.by_name import momentum
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.from_config import recipe_from_config
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.tasks.labels import classes_of
from hvdtrain.tasks.task import MEMBERS, Task, is_users_model
from hvdtrain.tasks.transform import Transform, Transforms, with_stats
from hvdtrain.training.model_inputs import X, input_names


def engine_of(config: Config, place: Placement) -> EngineChoice:
    """Returns the engine that connect() starts."""
    if config.comm.engine != "auto":
        return EngineChoice(config.comm.engine, f"comm.engine={config.comm.engine}")
    return select_engine(place, os.environ, installed_here(config), needed_features(config))


def connect(config: Config, place: Placement) -> tuple[Communicator, str]:
    """Connects this rank with the others. Returns the communicator, and why its engine was chosen.
    Raises UserError if it cannot connect."""
    if place.size > 1 and config.comm.engine in ("auto", "torchdist"):
        # torch.distributed warns of each connection from an address without a host name; read when
        # torch is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    allow_open_files(place.size)
    take_part_of_gpu(place, os.environ)
    name, reason = engine_of(config, place)
    # depends on that run's configuration, which is read later
    may_need_groups = config.resume not in (
        "auto",
        "no",
    )
    if (
        may_need_groups
        or config.parallel.ranks > 1
        or (config.shard.stage and config.shard.group == "node")
    ):
        # without it, Horovod does not create groups of ranks
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    engine: Any = plugins.load("comm", name, config.where("comm.engine"))
    communicator: Communicator = engine.connect(place, config.comm)
    if hasattr(engine, "note_on_speed") and (note := engine.note_on_speed(communicator)):
        reason += f"; {note}"
    return communicator, reason


def build_learner(config: Config, task: Task, communicator: Communicator) -> Learner:
    """Returns the model and optimizer of config.framework on this rank."""
    learner: Learner = plugins.load(
        "frameworks", config.framework, config.where("framework")
    ).build(config, task, communicator)
    return learner


def load_libraries(config: Config) -> None:
    """Imports the libraries that the framework would import later, so that memory measured from now
    on belongs to the job."""
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    if hasattr(framework, "load_libraries"):
        framework.load_libraries(config)


def build_recipe(config: Config, dataset: int, context: int | None) -> Recipe:
    """Builds the recipe of a job on `dataset` training samples, with `context` tokens each if they
    are text."""
    return recipe_from_config(config, dataset, momentum(config), context)


def build_task(train: Source, val: Source, config: Config) -> Task:
    """Builds the task that task.name selects, for both sets. Raises UserError if the sets do not
    match the task or each other, and for wrong options."""
    name = config.task.name
    where = config.where("task.name")
    standardize = config.task.options.get("standardize")
    train = with_stats(train, config.data, standardize)
    names = input_names(config, train)
    if names == X:
        task = _build(config, train, val)
    else:  # the task itself leaves its x as it is
        several_inputs = implementing_module("data.inputs").several_inputs
        as_it_is = config.replace(task=config.task.with_options(standardize=False))
        task = several_inputs(
            lambda *sources: _build(as_it_is, *sources), train, val, names, standardize, where
        )
    several = task.transforms
    if config.data.mean and (
        task.transform is None if several is None else "x" not in several.each
    ):
        what = (
            f"task.name={name} does not define how x is scaled, so data.mean and data.std would "
            "have no effect"
        )
        raise UserError(
            what,
            config.where("data.mean"),
            "leave them out, and let the task's Part.inputs() do it",
        )
    _check_gaps(config, task)
    given = config.task.given
    if given is not None and given.name is None:  # only metrics
        task = given.make(task, train)
    check_task(config, task)
    return task


def _check_gaps(config: Config, task: Task) -> None:
    """Raises UserError if something else than a regression from one x would get missing values, or
    nothing would use them."""
    where = config.where("data.gaps")
    if config.data.gaps and task.has_user_loss:
        what = f"data.gaps={config.data.gaps} needs task.name=regression, but this is a custom loss"
        raise UserError(what, where, "task.name=regression, or data without missing values")
    for name in config.data.gaps:
        if name not in task.fields:
            what = f"data.gaps has {name}, but the task uses {', '.join(task.fields)}"
            raise UserError(what, where, "leave it out")
        if task.transforms is not None and name in task.transforms.each:
            what = f"data.gaps has {name}, but only a model with one input x gets the mean for NaN"
            raise UserError(what, where, f"data.gaps without {name}, and values in place of NaN")


def _build(config: Config, train: Source, val: Source) -> Task:
    """Builds the task for sources with one x."""
    name = config.task.name
    where = config.where("task.name")
    if plugins.is_dotted(name):
        return _build_own(config, train, val)
    build = plugins.load("tasks", name, where).build
    task: Task = build(
        name,
        train,
        val,
        where,
        is_users_model(config.model),
        **plugins.convert_options(config.task, "tasks"),
    )
    return task


def _build_own(config: Config, train: Source, val: Source) -> Task:
    """Builds the task with the user's package.module:build, which gets its options, and train, val,
    name and users_model if it has these parameters."""
    name = config.task.name
    where = config.where("task.name")
    known = {"name": name, "train": train, "val": val, "users_model": is_users_model(config.model)}
    _check_takes(config)
    found = plugins.call_own(config.task, known)
    missing = [member for member in MEMBERS if not hasattr(found, member)]
    if missing:
        raise UserError(
            f"{name} returned a {type(found).__name__} without {', '.join(missing)}",
            where,
            "docs/tasks.md lists what a task has",
        )
    from hvdtrain.tasks.around import as_task

    return as_task(found)


def _check_takes(config: Config) -> None:
    """Raises UserError for an option of hvdtrain's tasks that the user's build does not accept."""
    name = config.task.name
    parameters = plugins.signature_of(plugins.own_function(config.task)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option in config.task.options.keys() - parameters.keys():
        own = [
            task
            for task, path in plugins.files("tasks").items()
            if option in plugins.options_of(path).model_fields
        ]
        if own:
            what = (
                f"task.{option} is an option of task.name={own[0]}, and {name} has no parameter "
                f"{option}"
            )
            fix = (
                f"add a parameter {option} to {name} that implements it; or leave task.{option} out"
            )
            raise UserError(what, config.where(f"task.{option}"), fix)


# Names that are taken by other sums and by other fields of the events "step" and "epoch".
_TAKEN_SUMS = {"count", "nonfinite", "save", *NOISE_SCALE_KEYS}
_TAKEN_FIELDS = {
    "count",
    "epoch",
    "epochs",
    "of",
    "seconds",
    "steps",
    "lr",
    "batch",
    "samples_per_s",
    "tokens_per_s",
    "device_samples_per_s",
    "device_tokens_per_s",
    "device_tflops",
    "mfu",
    "gpu_percent",
    "window_s",
    "phase_ms",
    "work_ms",
    "slowest_rank",
    "slowest_host",
    "memory_mb",
    "gpu_memory_mb",
    "watts",
    "wh",
    "joules",
    "target",
    "kind",
    *(field for feature in FEATURES for field in feature.event_fields),
}


def check_task(config: Config, task: Task) -> None:
    """Raises UserError if the task's metrics are inconsistent, or if other keys do not fit the
    task."""
    where = config.where("task.name")
    names = [metric.name for metric in task.metrics]
    if (
        task.objective not in names
        or "loss" not in names
        or "loss" not in task.sums
        or len(set(names)) < len(names)
    ):
        what = (
            f"the names of task.name={task.name} do not fit together: metrics {', '.join(names)}, "
            f"sums {', '.join(task.sums)}, objective {task.objective}"
        )
        raise UserError(
            what,
            where,
            "each metric once, loss among metrics and sums, and a metric as the objective",
        )
    wrong = [name for name in names if not name.isidentifier() or name in _TAKEN_FIELDS]
    wrong += [name for name in task.sums if not name.isidentifier() or name in _TAKEN_SUMS]
    if wrong:
        raise UserError(
            f"task.name={task.name} has a metric or a sum named {short(wrong[0])}",
            where,
            "another name, which is not reserved",
        )
    for error in task_conflicts_of(config, task):
        raise error
    averaging_of(config, task.fields)


def restore_task(config: Config, facts: dict[str, Any]) -> Task:
    """Restores a checkpoint's task from its Task.facts(), without its data.

    Raises KeyError, TypeError, ValueError or OverflowError if facts are missing or invalid, and
    UserError if the task cannot be restored.
    """
    name = config.task.name
    where = config.where("task.name")
    if not plugins.is_dotted(name):
        from hvdtrain.tasks.several_inputs import restore_inputs

        return restore_inputs(facts, plugins.load("tasks", name, where).restore)
    build = plugins.own_function(config.task)
    restore = getattr(build, "restore", None) or getattr(
        sys.modules[build.__module__], "restore", None
    )
    if restore is None:
        what = f"neither {name} nor its module has a restore(facts)"
        raise UserError(what, where, "define it: it rebuilds the task from its facts()")
    from hvdtrain.tasks.around import as_task

    return as_task(restore(facts))


def job_transform(task: Task, config: Config) -> Transform | Transforms | None:
    """Returns the transform of x, or of each of several inputs, before the model gets it; None if
    the task does not define one."""
    dtype = "float64" if config.speed.precision == "fp64" else "float32"
    keeps_integers = is_users_model(config.model)
    channels_last = config.framework in ("jax", "keras")

    def in_job(found: Transform) -> Transform:
        return replace(
            found, dtype=dtype, keeps_integers=keeps_integers, channels_last=channels_last
        )

    if task.transforms is not None:
        return task.transforms.changed(in_job)
    return None if task.transform is None else in_job(task.transform)


def planned_task(config: Config, source: Source) -> Task:
    """Builds the task of a job that is only described. For images it omits the pixel statistics,
    which take a pass over all of them."""
    if config.task.name == "classification" and isinstance(source, LabelledImages):
        ignored = plugins.convert_options(config.task, "tasks").get("ignore_label")
        return without_statistics(source.shape, classes_of(source, ignored), ignored)
    return build_task(source, source, config)

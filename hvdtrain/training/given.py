"""Converts the objects passed to hvdtrain.train() for the configuration and the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.config.plugins import is_torch_module, of_imported_frameworks
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import DEFAULT, Given, name_of_object
from hvdtrain.data.input_encoding import data_to_encode
from hvdtrain.data.source import Source, Split
from hvdtrain.data.user_data.arrays import is_array, to_numpy
from hvdtrain.errors import UserError
from hvdtrain.frameworks.by_name import makes_groups
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.user_functions import read_metrics
from hvdtrain.tasks.user_tasks import examples_of, measured, own_loss
from hvdtrain.training.hooks import check_hooks

Makers = Mapping[str, Given]  # section -> object


def given_model(model: Any) -> Given:
    """Converts a Keras model, a torch module, a model that framework=jax supports, or a function
    without a name. Raises UserError for other types."""
    for framework in of_imported_frameworks("given"):
        given: Given | None = framework.given_model(model)
        if given is not None:
            return given
    if is_torch_module(model):
        from hvdtrain.frameworks.torch.given_model import GivenModel

        of_torch = GivenModel(model)
        return Given(name_of_object(model), of_torch, {"model": model}, of_torch.take)
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        return Given(
            name_of_object(model[1]),
            lambda: model,
            {"model, init": model[0], "model, apply": model[1]},
        )
    if callable(model):
        return Given(name_of_object(model), model, {"model": model})
    what = f"model is a {type(model).__name__}"
    fix = (
        "a module of torch, Keras or a library of JAX, its class, a function that makes it, or a "
        "pair (init, apply) of JAX"
    )
    raise UserError(what, "hvdtrain.train()", fix)


def given_data(train: Any, val: Any) -> Given:
    """Converts two sets, or one that data.val_share splits."""

    def of(split: Split, *, columns: Any = None, missing: Any = "error", rare: int = 0) -> Any:
        """Returns the data; the others are data.columns, data.missing and data.rare."""
        source = train if split == "train" else val
        if source is None:
            fix = "val_data= of the same kind, or data.val_share=0.1"
            raise UserError("val_data is missing", "hvdtrain.train()", fix)
        if columns is None and missing == "error" and rare == 0:
            return source
        options = {"columns": columns, "missing": missing, "rare": rare}
        return data_to_encode(source, train, options, "hvdtrain.train()")

    if train is None:
        raise UserError("val_data without train_data", "hvdtrain.train()", "both")
    return Given(name_of_object(train), of, {"train_data": type(train), "val_data": type(val)})


def given_weights(weights: Any, data: Given | None) -> tuple[str, Given | None]:
    """Returns the value of data.sample_weights, and the data with an array of weights. Raises
    UserError if there are no samples for it."""
    if isinstance(weights, str):
        return weights, data
    where = "hvdtrain.train(), sample_weights"
    if data is None:
        raise UserError(
            "sample_weights is an array, but train_data is not given",
            where,
            "the name of a field of the data, or give train_data=",
        )
    if not is_array(weights) and not isinstance(weights, (list, tuple)):
        raise UserError(
            f"sample_weights is a {type(weights).__name__}",
            where,
            "an array, a number for each sample; or the name of a field",
        )
    array = to_numpy(weights if is_array(weights) else np.array(weights), "sample_weights", where)
    return name_of_object(array), data._replace(objects={**data.objects, "sample_weights": array})


def given_task(loss: Any, metrics: Mapping[str, Any] | None, objective: str | None) -> Given:
    """Converts a loss, whose task is named after its function, or only metrics, for the task that
    task.name selects."""
    own = read_metrics(metrics)
    objects = {f"metric {name}": one.function for name, one in own.items()} | {
        f"metric {name}, of": one.of for name, one in own.items()
    }

    def with_metrics(task: Task, train: Source) -> Task:
        examples = examples_of(train) if task.examples is None else task.examples
        return measured(task, own, objective, examples)

    if loss is None:
        return Given(None, with_metrics, objects)

    def task(
        train: Source,
        val: Source,
        users_model: bool,
        outputs: int | None = None,
        standardize: bool | None = None,
    ) -> Task:
        if standardize not in (None, True, False):
            raise UserError(
                f"task.standardize is {standardize!r:.40}",
                "hvdtrain.train()",
                "true, false, or leave it out",
            )
        return with_metrics(
            own_loss(
                name, train, val, "hvdtrain.train(), loss", loss, outputs, standardize, users_model
            ),
            train,
        )

    name = name_of_object(loss)
    return Given(name, task, {"loss": loss, **objects})


def given_optimizer(optimizer: Any) -> Given:
    """Converts an optax transformation or a function of torch's named parameters, both with their
    own learning rates; or a function without a name, which creates an optimizer with the recipe's
    rate.

    Raises UserError for other types.
    """
    init, update = (getattr(optimizer, name, None) for name in ("init", "update"))
    if callable(init) and callable(update):
        objects = {"optimizer, init": init, "optimizer, update": update}
        return Given(
            name_of_object(optimizer),
            lambda: optimizer,
            objects,
            framework="jax",
            unset={"base_lr": 1.0},
        )
    if makes_groups(optimizer):
        return Given(
            name_of_object(optimizer),
            optimizer,
            {"optimizer": optimizer},
            framework="torch",
            unset={"base_lr": 1.0},
        )
    if callable(optimizer):
        return Given(name_of_object(optimizer), optimizer, {"optimizer": optimizer})
    what = f"optimizer is a {type(optimizer).__name__}"
    fix = (
        "a class of torch.optim, which is called with the parameters of the model and optim.*; "
        "lambda named: torch.optim.AdamW([...], lr=...); a "
    )
    fix += "transformation of optax, or its function"
    raise UserError(what, "hvdtrain.train(), optimizer", fix)


def given_hooks(hooks: Any) -> Given:
    """Converts hooks. Raises UserError for anything but a list of hooks."""
    found = check_hooks(hooks)
    return Given(
        None, lambda: found, {f"hook {number}": type(hook) for number, hook in enumerate(found, 1)}
    )


def given_schedule(schedule: Any) -> Given:
    """Converts a schedule. Raises UserError for anything but a function."""
    if not callable(schedule):
        what = f"schedule is a {type(schedule).__name__}"
        raise UserError(
            what,
            "hvdtrain.train(), schedule",
            "a function of the share of the job that is done (0 to 1): lambda done: 1 - done",
        )
    return Given(None, lambda: schedule, {"schedule": schedule})


def with_given(config: Config, given: Makers) -> Config:
    """Adds these objects of a script to the configuration. Raises UserError if the configuration
    contradicts them."""
    objects = given["data"].objects if "data" in given else {}
    for key, share in (("val_share", config.data.val_share), ("share", config.data.share)):
        if share is not None and "sample_weights" in objects:
            raise UserError(
                "sample_weights belong to training samples, but "
                f"data.{key}={share:g} chooses these at random",
                config.where(f"data.{key}"),
                "a field of the data: data.sample_weights=weight"
                + "; or val_data=" * (key == "val_share"),
            )
    if config.data.val_share is not None and objects.get("val_data", type(None)) is not type(None):
        what = f"val_data and data.val_share={config.data.val_share:g} are both given"
        raise UserError(what, config.where("data.val_share"), "one of them")
    hooks = given.get("hooks")
    for section, one in given.items():
        if one.framework in (None, config.framework):
            continue
        if config.origin("framework") == DEFAULT:
            config = config.replace(framework=one.framework)
        elif config.framework not in one.also_trained_by:
            what = (
                f"{section} belongs to framework={one.framework}, but the job has "
                f"framework={config.framework}"
            )
            raise UserError(
                what,
                config.where("framework"),
                f"framework={one.framework}, or leave framework out",
            )
    sections = {
        section: _with_one(getattr(config, section), one)
        for section, one in given.items()
        if section != "hooks"
    }
    config = config.replace(**sections)
    return (
        config.replace(hooks=[*config.hooks, *map(name_of_object, hooks.make())]).with_given(hooks)
        if hooks
        else config
    )


def _with_one(section: Any, given: Given) -> Any:
    unset = {key: value for key, value in given.unset.items() if section.origin(key) == DEFAULT}
    return section.with_given(given).replace(**unset)

"""The fields of the data that a model is called with: data.inputs, the parameters of its forward(),
a nested x, or only x."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementation
from hvdtrain.data.field import TARGETS, Field
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError, nearest
from hvdtrain.tasks.task import is_users_model

KEY = "data.inputs"
X = ("x",)  # the one input of most models, which a task transforms itself
# tasks that take x, besides a script's loss
_OF_X = (
    "classification",
    "multilabel",
    "segmentation",
    "regression",
)


def input_names(config: Config, source: Source) -> tuple[str, ...]:
    """Returns the fields of this source that the model gets, in order; X: only x.

    Raises UserError if one is missing, and for options that do not support several inputs.
    """
    if not takes_x(config):
        _refuse_key(config, f"task.name={config.task.name} makes the inputs of its model itself")
        return X
    names = _names(config, source.fields, source.nested_inputs)
    if names != X:
        _check(config, names, source.fields)
    elif "x" not in source.fields:
        _refuse_unnamed(config, source.fields)
    return names


def takes_x(config: Config) -> bool:
    """Whether the task is a script's loss, or one of hvdtrain's tasks that learn from x."""
    given = config.task.given
    return config.task.name in _OF_X or (given is not None and given.name is not None)


def names_to_keep(config: Config) -> tuple[str, ...]:
    """Returns names of fields that a job needs: a Dataset's "image" is not renamed to x if the
    model has a parameter image among others."""
    asked = asked_by_forward(config)
    return tuple(config.data.inputs) or (asked if len(asked) > 1 else ())


def _names(config: Config, fields: Mapping[str, Field], nested: tuple[str, ...]) -> tuple[str, ...]:
    if config.data.inputs:
        return (*config.data.inputs, *_attention_mask(config, config.data.inputs, fields))
    asked = asked_by_forward(config)
    if "attention_mask" in asked and "attention_mask" not in fields:
        others = tuple(name for name in asked if name != "attention_mask")
        others = X if len(others) == 1 and others[0] not in fields else others
        if mask := _attention_mask(config, others, fields):
            return (*others, *mask)
    is_named = len(asked) == 1 and asked[0] in fields and asked[0] not in ("x", *TARGETS)
    if len(asked) > 1 or is_named or (asked == X and _masks_with_default(config, asked, fields)):
        return (*asked, *_masks_with_default(config, asked, fields))
    names = nested or X
    return (*names, *_attention_mask(config, names, fields))


def _attention_mask(
    config: Config, names: Iterable[str], fields: Mapping[str, Field]
) -> tuple[str, ...]:
    """Returns the mask of the only padded input, if the model has a parameter attention_mask for
    it. A model of transformers by name is checked when it is made."""
    masks = _masks(names, fields)
    if len(masks) != 1 or masks[0] in names or "attention_mask" in names:
        return ()
    forward = _forward(config)
    takes = forward is not None and "attention_mask" in inspect.signature(forward).parameters
    is_of_transformers = config.framework == "torch" and config.model.name.startswith(
        "transformers:"
    )
    return tuple(masks) if takes or is_of_transformers else ()


def _masks_with_default(
    config: Config, asked: tuple[str, ...], fields: Mapping[str, Field]
) -> tuple[str, ...]:
    """Returns the masks of padded inputs that forward() also accepts, as parameters with a
    default."""
    found = [mask for mask in _masks(asked, fields) if mask not in asked]
    parameters = inspect.signature(_forward(config)).parameters if found else {}
    return tuple(
        mask
        for mask in found
        if mask in parameters and parameters[mask].kind is not inspect.Parameter.VAR_KEYWORD
    )


def _masks(names: Iterable[str], fields: Mapping[str, Field]) -> list[str]:
    """Returns the names of the padded fields' masks."""
    return [
        field.padding.mask
        for name in names
        if (field := fields.get(name)) and field.padding and not field.is_mask
    ]


def asked_by_forward(config: Config) -> tuple[str, ...]:
    """Parameters without a default of a user's torch model's forward(); none if the configuration
    does not name its class."""
    forward = _forward(config)
    return () if forward is None else _required(forward)


def _forward(config: Config) -> Any:
    """Returns the method forward() of a user's torch model; None if the configuration does not name
    its class."""
    if (
        config.framework != "torch"
        or not is_users_model(config.model)
        or plugins.is_library(config.model.name)
    ):
        return None
    made: Any = plugins.own_function(config.model)
    model = getattr(made, "model", None)  # an object that a script passes
    # within torch.compile
    kind = type(getattr(model, "_orig_mod", model)) if plugins.is_torch_module(model) else made
    return getattr(kind, "forward", None) if isinstance(kind, type) else None


def _required(forward: Any) -> tuple[str, ...]:
    """Returns the names of the required parameters after self; none if some have no name, or if the
    signature cannot be read."""
    try:
        _, *parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    required = [
        one
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return (
        ()
        if any(one.kind is one.POSITIONAL_ONLY for one in required)
        else tuple(one.name for one in required)
    )


def _refuse_unnamed(config: Config, fields: Mapping[str, Field]) -> None:
    """Raises UserError if there is no x but several possible inputs; otherwise the task reports
    what is missing."""
    others = [name for name in fields if name not in TARGETS]
    if len(others) < 2:
        return
    what = f"the model takes one input x, but the data have {_list(fields)}"
    if implementation(KEY) is None:
        fix = "one field x"
    elif config.framework == "torch" and is_users_model(config.model):
        fix = (
            f"data.inputs=[{','.join(others)}] with the fields that it takes; or forward() with "
            "parameters of these names"
        )
    else:
        fix = (
            "one field x; or framework=torch and your own model, whose forward() has parameters "
            "of these names"
        )
    raise UserError(what, config.where("model.name"), fix)


def _check(config: Config, names: tuple[str, ...], fields: Mapping[str, Field]) -> None:
    """Raises UserError if a field is missing or is the target, or if the job has an option that
    only supports x."""
    shown = ", ".join(names)
    where = config.where("data.inputs" if config.data.inputs else "model.name")
    asks = "data.inputs names" if config.data.inputs else f"forward() of {config.model.name} takes"
    if implementation(KEY) is None:
        raise UserError(
            f"{asks} {shown}, but this copy of hvdtrain has no extra that does {KEY}",
            where,
            "a model that only takes x; `hvdtrain extras` lists the installed extras",
        )
    if len(set(names)) < len(names):
        raise UserError(f"data.inputs names a field twice: {shown}", where, "each field once")
    if "y" in names:
        raise UserError(
            f"{asks} {shown}, but y is the target",
            where,
            "use another name for an input with the same values",
        )
    if missing := [name for name in names if name not in fields]:
        what = f"{asks} {shown}; the data have {_list(fields)}, but not {missing[0]}"
        raise UserError(
            what,
            where,
            f"{nearest(missing[0], sorted(fields))}; or data.inputs=[FIELD, ...] with the fields "
            "that the model takes",
        )
    if config.framework != "torch":
        what = (
            f"a model with the inputs {shown} needs framework=torch, but this is "
            f"framework={config.framework}"
        )
        raise UserError(
            what,
            config.where("framework"),
            "framework=torch; or one field x that contains all of them",
        )
    if not is_users_model(config.model):
        what = f"model.name={config.model.name} takes one input x, but the data provide {shown}"
        raise UserError(
            what,
            config.where("model.name"),
            "a model of your own, package.module:Class; or one field x",
        )
    if key := config.parallel.cut_by:
        what = f"parallel.{key} only supports models with one input, but this one takes {shown}"
        raise UserError(
            what,
            config.where(f"parallel.{key}"),
            f"leave parallel.{key} out; shard.stage=3 divides its weights among ranks",
        )
    if mixes := next((key for key in ("mixup", "cutmix") if getattr(config.augment, key)), ""):
        what = f"augment.{mixes} only mixes x, but the model takes {shown}"
        raise UserError(what, config.where(f"augment.{mixes}"), f"augment.{mixes}=0")


def _refuse_key(config: Config, why: str) -> None:
    if config.data.inputs:
        raise UserError(
            f"data.inputs={list(config.data.inputs)} has no effect: {why}",
            config.where("data.inputs"),
            "leave it out",
        )


def _list(fields: Iterable[str]) -> str:
    return ", ".join(fields)


def notes_on_fields(config: Config, source: Source, used: Iterable[str]) -> list[str]:
    """Returns a line for the user about masks that the model does not get, or about unused fields
    of a job with several inputs."""
    if not takes_x(config):
        return []
    names = input_names(config, source)
    if without := [mask for mask in _masks(names, source.fields) if mask not in names]:
        line = f"the model does not get {', '.join(without)}, and sees padding"
        if implementation(KEY) is None:
            return [line]
        return [f"{line}; forward(self, {', '.join([*names, *without])}) gets it"]
    unused = [name for name in source.fields if name not in {*used, config.data.sample_weights}]
    if names == X or not unused:
        return []
    fix = f"data.inputs=[{','.join([*names, unused[0]])}] gives the model {unused[0]} too"
    return [f"nothing uses the field{'s' if len(unused) > 1 else ''} {', '.join(unused)}; {fix}"]

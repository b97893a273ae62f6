"""Resolves model.name, optim.name and optim.groups in any framework: a plugin, or the user's class
or function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.optim import GroupConfig
from hvdtrain.core.ties import Ties
from hvdtrain.errors import UserError, closest, nearest, short
from hvdtrain.optim.groups import Grouped, ParameterGroup, number_of_group, number_of_layer
from hvdtrain.optim.rule import Rule, is_excluded
from hvdtrain.tasks.task import Task

if TYPE_CHECKING:
    from hvdtrain.optim.thawing import ThawEntries


def build_model(
    config: Config, task: Task, folder: str, more: Mapping[str, Any] | None = None
) -> Any:
    """Builds the model: calls build() of a plugin in `folder`, or the user's package.module:name,
    with the options of `model`.

    Both get the values of Task.sizes that match their parameters; the user's function also gets
    values of `more`. Raises UserError if a plugin needs a size that the task does not have, or if
    options do not match.
    """
    name = config.model.name
    where = config.where("model.name")
    if not plugins.is_dotted(name):
        build = plugins.load(folder, name, where).build
        signature = inspect.signature(build)
        needed = [
            p.name
            for p in signature.parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "name"
        ]
        if missing := [size for size in needed if size not in task.sizes]:
            has = f"task.name={task.name} has {', '.join(task.sizes)}"
            what = f"model.name={name} is built from {' and '.join(missing)}, and {has}"
            why, fix = task.why_without(missing[0])
            if why:
                what = f"model.name={name} maps to maps, but {why}"
            raise UserError(what, where, fix or "another model.name, or another task.name")
        _check_images(config, task, signature)
        return build(
            name,
            *(task.sizes[size] for size in needed),
            **plugins.convert_options(config.model, folder),
        )
    return plugins.call_own(config.model, {**task.sizes, **(more or {})})


def _check_images(config: Config, task: Task, signature: inspect.Signature) -> None:
    """Raises UserError if a plugin for images (H, W, C) gets other data."""
    shape = signature.parameters.get("shape")
    if (
        shape is not None
        and shape.annotation == "tuple[int, int, int]"
        and len(task.sizes["shape"]) != 3
    ):
        what = (
            f"model.name={config.model.name} takes images (H, W, C), but the inputs of this job "
            f"are {tuple(task.sizes['shape'])}"
        )
        raise UserError(
            what, config.where("model.name"), "model.name=mlp or linear, or a class of your own"
        )


def is_made_with_the_model(config: Config) -> bool:
    """Whether optim.name is a class of torch.optim, a function of optax, or the user's class or
    function, and not a rule of hvdtrain."""
    others = {"torch": ("optax.", "optax:"), "jax": ("torch.", "torch:")}.get(
        config.framework, ("",)
    )
    return plugins.is_dotted(config.optim.name) and not config.optim.name.startswith(others)


def makes_groups(optimizer: Any) -> bool:
    """Whether the optimizer is a function of `named` parameters that creates a torch optimizer with
    its own groups."""
    if inspect.isclass(optimizer) or not callable(optimizer):
        return False
    try:
        return next(iter(inspect.signature(optimizer).parameters), "") == "named"
    except ValueError:  # one written in C
        return False


def build_rule(config: Config, ties: Ties | None = None) -> Rule:
    """Builds the rule with the options of `optim`, its groups and averages.

    Raises UserError for a user's optimizer, which is not a rule.
    """
    name = config.optim.name
    where = config.where("optim.name")
    if plugins.is_dotted(name):
        kind = {"torch": "a torch optimizer", "optax": "a function of optax"}.get(
            re.split("[.:]", name)[0], "code of your own"
        )
        takes = {"torch": " or a class of torch.optim", "jax": " or a function of optax"}.get(
            config.framework, ""
        )
        fix = f"framework={'jax' if kind.endswith('optax') else 'torch'}, or a name of `list`"
        raise UserError(
            f"{name} is {kind}, but framework={config.framework} needs a rule{takes}", where, fix
        )
    build = plugins.load("optim", name, where).build
    rule: Rule = build(**plugins.convert_options(config.optim, "optim"))
    groups = tuple(
        ParameterGroup(
            group.names,
            group.rate,
            group.decay,
            group.momentum,
            group.layer_rate,
            group.layers or 0,
        )
        for group in config.optim.groups
    )
    rule = Grouped(rule, groups) if groups else rule
    if config.model.thaw:
        from hvdtrain.optim.thawing import Thawing

        rule = Thawing(rule, thaw_entries(config.model, ties))
    if config.optim.ema is None:
        return rule
    from hvdtrain.optim.weight_average import Averaged

    return Averaged(rule, config.optim.ema)


def thaw_entries(model: ModelConfig, ties: Ties | None = None) -> ThawEntries:
    """Returns the entries of model.thaw, with the rule that decides whether a weight is frozen."""
    from hvdtrain.optim.thawing import ThawEntries

    return ThawEntries(
        tuple(tuple(entry.names) for entry in model.thaw),
        tuple(model.freeze),
        (*model.lora_train, *model.weights_skip) if model.lora else None,
        tuple(map(tuple, ties.groups())) if ties is not None else (),
    )


def check_patterns(
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    ties: Ties | None = None,
    frozen: Callable[[], Iterable[str]] = tuple,
) -> list[str]:
    """Returns header lines on patterns of optim.groups and of muon's optim.rest that match one of
    several names of a parameter.

    shapes: of the trained parameters; frozen: returns the names of frozen parameters. Raises
    UserError if a pattern would have no effect on these parameters.
    """
    # the default names weights of many models
    given = config.optim.options.get("rest", ()) if config.optim.name == "muon" else ()
    lines = []
    for key, patterns in (
        ("optim.groups", [group.names for group in config.optim.groups]),
        ("optim.rest", given),
    ):
        lines += _lines_of_ties(key, patterns, ties, config.where(key)) if ties and patterns else []
    for number, group in enumerate(config.optim.groups):
        entry = f"{_entry(number, group)},"
        _check_fits(config, "optim.groups", entry, group.names, shapes, frozen)
    for number, pattern in enumerate(given):
        entry = f"optim.rest[{number}], {short(pattern)},"
        _check_fits(config, "optim.rest", entry, pattern, shapes, frozen)
    _check_groups(config, shapes)
    return lines


def _lines_of_ties(key: str, patterns: Sequence[str], ties: Ties, where: str) -> list[str]:
    """Returns header lines about tied parameters. Raises UserError if a pattern matches a name of a
    tied parameter whose first name belongs to another entry or to no entry."""
    lines = []
    for own, *others in ties.groups():
        entry = number_of_group(own, patterns)
        for other in others:
            number = number_of_group(other, patterns)
            if number is not None and number != entry:
                what = (
                    f"{key}[{number}], {short(patterns[number])}, matches {other} but not {own}, "
                    "which is the same array (tied weights)"
                )
                raise UserError(
                    what,
                    where,
                    f"patterns that match both {own} and {other} or neither; or a model that does "
                    "not tie them",
                )
        if entry is not None and others:
            lines.append(
                f"{key}[{entry}]: {own} is {' and '.join(others)} too (tied weights): it counts "
                "for both"
            )
    return lines


def _check_fits(
    config: Config,
    key: str,
    entry: str,
    pattern: str,
    shapes: Mapping[str, tuple[int, ...]],
    frozen: Callable[[], Iterable[str]],
) -> None:
    """Raises UserError if the pattern of an entry matches no trained parameter."""
    if _fitting(pattern, shapes):
        return
    fitting = _fitting(pattern, frozen())
    if not fitting:
        what = f"{entry} matches no parameter of the model"
        raise UserError(what, config.where(key), _meant(pattern, shapes))
    if number_of_group(fitting[0], config.model.freeze) is not None:
        frozen_by = "which model.freeze freezes"
        fix = "leave the entry out, or use patterns of model.freeze that do not match them"
    elif config.model.lora:
        frozen_by = "which model.lora freezes"
        fix = "leave the entry out; model.lora_train lists what is trained besides the adapters"
    else:
        frozen_by = "which the model does not train"
        fix = "leave the entry out, or requires_grad=True (Keras: trainable=True) in the model"
    what = f"{entry} matches only {short(', '.join(fitting))}, {frozen_by}"
    raise UserError(what, config.where(key), fix)


def _entry(number: int, group: GroupConfig) -> str:
    return f"optim.groups[{number}], names={short(group.names)}"


def _check_groups(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> None:
    groups = config.optim.groups
    where = config.where("optim.groups")
    excludes = config.optim.exclude == "norms_and_biases"
    number_of = (
        {name: number_of_group(name, [group.names for group in groups]) for name in shapes}
        if groups
        else {}
    )
    for number, group in enumerate(groups):
        entry = f"{_entry(number, group)},"
        own = [name for name in shapes if number_of[name] == number]
        if not own:
            fitting = short(", ".join(_fitting(group.names, shapes)))
            what = f"{entry} matches only parameters that earlier entries match: {fitting}"
            raise UserError(what, where, "put it before them, or leave it out")
        _check_layers(group, entry, own, where)
        if group.decay != 1 and excludes and all(is_excluded(shapes[name]) for name in own):
            what = (
                f"{entry} has decay={group.decay:g}, but optim.exclude={config.optim.exclude} "
                f"excludes {own[0]} from decay"
            )
            raise UserError(what, where, "optim.exclude=none, or an entry without decay")


def _check_layers(group: GroupConfig, entry: str, own: Sequence[str], where: str) -> None:
    """Raises UserError if #, layer_rate and layers of an entry do not belong together."""
    has = ("#" in group.names, group.layer_rate is not None, group.layers is not None)
    if group.names.count("#") > 1 or len(set(has[1:])) > 1 or (has[1] and not has[0]):
        raise UserError(
            f"{entry} needs layer_rate, layers and one # together",
            where,
            "{names: 'blocks.#.*', layer_rate: 0.75, layers: 12}",
        )
    if group.layers is not None:
        found = 1 + max(number_of_layer(name, group.names) or 0 for name in own)
        if found != group.layers:
            raise UserError(
                f"{entry} has layers={group.layers}, but the model's layers are numbered from 0 "
                f"to {found - 1}",
                where,
                f"layers: {found}",
            )


def _fitting(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns the names that a pattern matches."""
    return [name for name in names if number_of_group(name, [pattern]) is not None]


def _meant(pattern: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns the fix for a pattern that matches no parameter: the nearest name, or the existing
    names."""
    found = nearest(pattern, list(shapes))
    return (
        found
        if closest(pattern, list(shapes))
        else f"a name with *, as in {_example(shapes)}; {found}"
    )


def _example(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns a pattern that matches some of the names, such as '*.bias', or the last name."""
    last = list(shapes)[-1]
    return f"'*.{last.rpartition('.')[2]}'" if "." in last else last


class Activation(NamedTuple):
    """The activation that the loss of a task applies to outputs, so that the model should not apply
    it."""

    name: str
    line: str  # header line, if the model applies it


def twice_activated(config: Config) -> Activation | None:
    """Returns the activation that a loss applies; None if it applies none, and for a user's
    loss."""
    names = {
        "classification": "softmax",
        "segmentation": "softmax",
        "language": "softmax",
        "multilabel": "sigmoid",
    }
    name = names.get(config.task.name)
    if name is None or config.model.loss != "cross_entropy":
        return None
    line = (
        f"the model ends in a {name}, and the loss of task.name={config.task.name} applies another "
        f"{name} to its outputs: end the model without it"
    )
    return Activation(name, line)


def momentum(config: Config) -> float:
    """Returns optim.momentum, or the rule's default if it is not set; 0 for a class of torch.optim,
    which has its own default."""
    if config.optim.momentum is not None or plugins.is_dotted(config.optim.name):
        return config.optim.momentum or 0.0
    return build_rule(config).momentum


def decay(config: Config) -> float | None:
    """Returns optim.weight_decay, or the default of a class of torch.optim if it is not set; None
    if the class has no default, or creates groups."""
    if config.optim.weight_decay is not None:
        return config.optim.weight_decay
    constructor = plugins.own_function(config.optim)
    if makes_groups(constructor):
        return None
    try:
        found = inspect.signature(constructor).parameters["weight_decay"].default
    except (TypeError, ValueError, KeyError):
        return None
    return float(found) if isinstance(found, int | float) else None

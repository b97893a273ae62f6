"""A keras.Model of the user's as an object: the names of its variables, its copy, and what it has
besides layers: methods, compile()."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError

# what fit() learns from
_LEARNS = (
    "train_step",
    "compute_loss",
    "compute_loss_and_updates",
    "stateless_compute_loss",
)
_OTHER_METHODS = ("test_step", "predict_step", "compute_metrics", "fit", "evaluate", "predict")


def added_loss(losses: Sequence[Any]) -> Any:
    """The sum of model.losses, as Keras' fit() adds it to the mean loss of a batch: a scalar of the
    backend, 0.0 where there are none."""
    ops = sys.modules["keras"].ops
    return sum(
        (ops.sum(ops.cast(loss, sys.modules["keras"].config.floatx())) for loss in losses), 0.0
    )


def users_object(model: Any, config: Config) -> Any:
    """The object that `model` is a copy of, if a script has given one; otherwise the model."""
    make = config.model.given.make if config.model.given else None
    return make.model if isinstance(make, GivenKerasModel) else model


def check_and_describe(model: Any, where: str) -> list[str]:
    """Lines that name what hvdtrain does not use of a model. Raises UserError for methods that
    would learn something else."""
    if found := _overridden(model, _LEARNS):
        what = (
            f"{type(model).__name__} has its own {_calls(found)}, which hvdtrain.train() does not "
            "call: it uses the loss of the task"
        )
        fix = (
            "hvdtrain.train(loss=a function (outputs, batch)) with framework=torch; add_loss() in "
            "a layer; or Keras' fit() (docs/keras.md)"
        )
        raise UserError(what, where, fix)
    lines = []
    if found := _overridden(model, _OTHER_METHODS):
        lines.append(f"not used: {_calls(found)} of {type(model).__name__}")
    if getattr(model, "compiled", False):
        lines.append(
            f"not used: compile({_compiled(model)}): the loss is that of the task, the optimizer "
            "that of optim.*"
        )
    return lines


def _overridden(model: Any, methods: Sequence[str]) -> list[str]:
    """Names of the methods that are not Keras' own."""
    return [name for name in methods if name in vars(model) or not _is_of_keras(type(model), name)]


def _is_of_keras(kind: type, name: str) -> bool:
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner is None or owner.__module__.partition(".")[0] == "keras"


def _calls(methods: Sequence[str]) -> str:
    return ", ".join(f"{name}()" for name in methods)


def _compiled(model: Any) -> str:
    """optimizer=Adam, loss=mse, loss_weights, metrics=accuracy"""
    try:
        config = model.get_compile_config() or {}
    except Exception:  # of objects that cannot be written as text
        config = {}
    optimizer = getattr(model, "optimizer", None)
    found = [f"optimizer={type(optimizer).__name__}"] if optimizer is not None else []
    return ", ".join(
        [
            *found,
            *(f"{key}{_plain(config[key])}" for key in _COMPILED if config.get(key) is not None),
        ]
    )


_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")


def _plain(value: Any) -> str:
    """=mse; nothing of what is longer than a word."""
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        value = value["class_name"]
    return f"={value}" if isinstance(value, str) and len(value) <= 40 else ""


class GivenKerasModel:
    """Makes the model of a job from one that a script gives: a copy is trained, whose weights
    become the script's model's at the end."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "model": type(self.model),
            "model, its weights": [tuple(w.shape) for w in self.model.get_weights()],
        }

    def __call__(self) -> Any:
        """Raises UserError if the model cannot be copied."""
        try:
            model = importlib.import_module("keras").models.clone_model(self.model)
            model.set_weights(self.model.get_weights())
        except Exception as error:
            what = (
                f"model={type(self.model).__name__} cannot be copied: {type(error).__name__}: "
                f"{error}"
            )
            raise UserError(
                what,
                "hvdtrain.train(), model",
                "a function that returns the model; or define its get_config()",
            ) from error
        return model

    def take(self, learner: Any) -> None:
        """Copies the weights of evaluations (averages, if there are any), and all other variables
        of the layers."""
        variables = dict(named_variables(self.model))
        for name, array in _weights_of(learner).items():
            variables[name].assign(array)


def _weights_of(learner: Any) -> Mapping[str, Any]:
    """Weights and buffers of a learner of torch, or of one on the host, by name. A collective."""
    if callable(learner.weights):
        return cast("Mapping[str, Any]", learner.weights())
    with learner.averaged():
        return {**learner.weights, **learner.model.buffers()}


def build_variables(model: Any, config: Config, x: np.ndarray) -> None:
    """Makes the variables of a model, and of the script's object that it is a copy of, by a call
    with x; each has what the other one has.

    Raises UserError if they have different variables.
    """
    original = users_object(model, config)
    for one in (model, original):
        if not one.built:
            one(x)
    copies = dict(named_variables(model))
    variables = dict(named_variables(original))
    if different := sorted(copies.keys() ^ variables.keys()):
        what = (
            f"hvdtrain trains a copy of model={type(original).__name__}, but the copy has "
            f"different variables: {', '.join(different[:4])}"
        )
        raise UserError(
            what,
            "hvdtrain.train(), model",
            "a function that returns the model; or define its get_config()",
        )
    for name, variable in variables.items():
        copies[name].trainable = variable.trainable
        copies[name].regularizer = variable.regularizer
        copies[name].constraint = variable.constraint


def assigned_in_call(model: Any, where: str, x: np.ndarray) -> list[str]:
    """A line of the header on trainable variables that layers assign in call(), which Keras on JAX
    does not store. x: samples.

    Raises UserError on the other backends: the update would be of the weight before that, and each
    pass and rank would assign its own.
    """
    scope = _called_aside(model, x)
    names = [
        name
        for name, v in named_variables(model)
        if v.trainable and scope.get_current_value(v) is not None
    ]
    if not names:
        return []
    if sys.modules["keras"].backend.backend() == "jax":
        return [
            f"not stored: what call() assigns to {', '.join(names)}, a trainable variable; Keras' "
            "fit() on JAX does not store it either"
        ]
    what = (
        f"call() of a layer assigns to the trainable variable {names[0]}, but only the optimizer "
        "may change it, once in each step"
    )
    fix = (
        "framework=keras with KERAS_BACKEND=jax, where the assigned value is part of one call, as "
        "in keras.layers.SpectralNormalization; add_weight(trainable=False); or Keras' fit() "
        "(docs/keras.md)"
    )
    raise UserError(what, where, fix)


def _called_aside(model: Any, x: np.ndarray) -> Any:
    """The scope of calls in training and in evaluation, which has what they assign; the model and
    torch's random numbers stay as they are."""
    keras = sys.modules["keras"]
    is_on_torch = keras.backend.backend() == "torch"
    torch = sys.modules["torch"] if is_on_torch else None
    # of torch modules in layers; a scope of Keras does not know them
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if is_on_torch else []
    random = torch.random.fork_rng(devices=[]) if torch else contextlib.nullcontext()
    aside = torch.no_grad() if torch else contextlib.nullcontext()
    with random, aside, keras.StatelessScope() as scope:
        # a model that fails in training has its own message there
        with contextlib.suppress(Exception):
            for training in (True, False):
                model(x, training=training)
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return scope


def named_variables(layer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each variable of a layer and of the layers inside of it, by a name that does not depend on
    what the process has made before.

    Keras numbers layers over the whole process (dense, dense_1, ...), and variables that
    add_weight() gets no name for; here they are numbered inside of the layer that has them. A layer
    or a variable with a name of the user's keeps it.
    """
    seen: set[int] = set()
    for name, variable in _named(layer, prefix, {}):
        if id(variable) not in seen:
            seen.add(id(variable))
            yield name, variable


def _named(layer: Any, prefix: str, taken: dict[str, int]) -> Iterator[tuple[str, Any]]:
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        yield f"{prefix}{_numbered(_name_of(variable, layer), taken)}", variable
    for inner in layer._layers:
        automatic = re.fullmatch(
            rf"((?:forward_|backward_)?{_snake(type(inner).__name__)})(_\d+)?", inner.name
        )
        name = _numbered(automatic[1] if automatic else inner.name, taken)
        yield from _named(inner, f"{prefix}{name}.", {})


def _name_of(variable: Any, layer: Any) -> str:
    """Returns the variable's name, or that of the layer's attribute; Keras names others by a
    counter of the process."""
    if not re.fullmatch(rf"{_snake(type(variable).__name__)}(_\d+)?", variable.name):
        return str(variable.name)
    return next(
        (name for name, value in vars(layer).items() if value is variable),
        _snake(type(variable).__name__),
    )


def _numbered(name: str, taken: dict[str, int]) -> str:
    number = taken.get(name, 0)
    taken[name] = number + 1
    return f"{name}_{number}" if number else name


def _snake(name: str) -> str:
    """BatchNormalization -> batch_normalization, as Keras names layers."""
    return re.sub(
        r"([a-z])([A-Z])",
        r"\1_\2",
        re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", re.sub(r"\W+", "", name)),
    ).lower()

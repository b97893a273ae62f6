"""A user's keras.Model as an object: the names of its variables, its copy, and its overridden
methods and compile() arguments."""

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

# methods that change what fit() trains
_LEARNS = (
    "train_step",
    "compute_loss",
    "compute_loss_and_updates",
    "stateless_compute_loss",
)
_OTHER_METHODS = ("test_step", "predict_step", "compute_metrics", "fit", "evaluate", "predict")


def added_loss(losses: Sequence[Any]) -> Any:
    """Returns the sum of model.losses, which Keras' fit() adds to the mean loss of a batch: a
    scalar of the backend, or 0.0 if there are none."""
    ops = sys.modules["keras"].ops
    return sum(
        (ops.sum(ops.cast(loss, sys.modules["keras"].config.floatx())) for loss in losses), 0.0
    )


def users_object(model: Any, config: Config) -> Any:
    """Returns the script's object that `model` is a copy of, if any; otherwise the model."""
    make = config.model.given.make if config.model.given else None
    return make.model if isinstance(make, GivenKerasModel) else model


def check_and_describe(model: Any, where: str) -> list[str]:
    """Returns lines that name the parts of a model that hvdtrain does not use. Raises UserError for
    methods that change the training."""
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
    """Returns the names of overridden Keras methods."""
    return [name for name in methods if name in vars(model) or not _is_of_keras(type(model), name)]


def _is_of_keras(kind: type, name: str) -> bool:
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner is None or owner.__module__.partition(".")[0] == "keras"


def _calls(methods: Sequence[str]) -> str:
    return ", ".join(f"{name}()" for name in methods)


def _compiled(model: Any) -> str:
    """Describes the arguments of compile(): optimizer=Adam, loss=mse, loss_weights,
    metrics=accuracy."""
    try:
        config = model.get_compile_config() or {}
    except Exception:  # objects that cannot be serialized
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
    """Formats a value as =mse; empty for anything longer than a word."""
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        value = value["class_name"]
    return f"={value}" if isinstance(value, str) and len(value) <= 40 else ""


class GivenKerasModel:
    """Makes a job's model from a script's model: trains a copy, and copies its weights to the
    script's model at the end."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def facts(self) -> dict[str, Any]:
        """Returns the values that must be equal on all ranks."""
        return {
            "model": type(self.model),
            "model, its weights": [tuple(w.shape) for w in self.model.get_weights()],
        }

    def __call__(self) -> Any:
        """Returns a copy of the model. Raises UserError if the model cannot be copied."""
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
    """Returns weights and buffers of a torch or host learner, by name. A collective."""
    if callable(learner.weights):
        return cast("Mapping[str, Any]", learner.weights())
    with learner.averaged():
        return {**learner.weights, **learner.model.buffers()}


def build_variables(model: Any, config: Config, x: np.ndarray) -> None:
    """Creates the variables of a model, and of the script's object that it is a copy of, by a call
    with x, with equal values in both.

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
    """Returns a header line about trainable variables that layers assign in call(), which Keras on
    JAX does not store. x: samples.

    Raises UserError on the other backends. There the update would be based on the weight before the
    assignment, and each pass and rank would assign a different value.
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
    """Calls the model in training and in evaluation, and returns the scope with the assignments.
    The model and torch's random state do not change."""
    keras = sys.modules["keras"]
    is_on_torch = keras.backend.backend() == "torch"
    torch = sys.modules["torch"] if is_on_torch else None
    # buffers of torch modules in layers, which a Keras scope does not cover
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if is_on_torch else []
    random = torch.random.fork_rng(devices=[]) if torch else contextlib.nullcontext()
    aside = torch.no_grad() if torch else contextlib.nullcontext()
    with random, aside, keras.StatelessScope() as scope:
        # a model that fails in training has a separate message
        with contextlib.suppress(Exception):
            for training in (True, False):
                model(x, training=training)
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return scope


def named_variables(layer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each variable of a layer and its sublayers, by a name that does not depend on layers
    created earlier in the process.

    Keras numbers layers, and variables that add_weight() creates without a name, over the whole
    process (dense, dense_1, ...). Here they are numbered within their layer. Names given by the
    user are kept.
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
    """Returns the variable's name, or the name of the layer's attribute; Keras names other
    variables by a counter of the process."""
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
    """Converts BatchNormalization to batch_normalization, as in Keras' layer names."""
    return re.sub(
        r"([a-z])([A-Z])",
        r"\1_\2",
        re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", re.sub(r"\W+", "", name)),
    ).lower()

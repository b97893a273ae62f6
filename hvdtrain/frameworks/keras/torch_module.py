"""KerasModule: a keras.Model on Keras' torch backend as a torch module, whose weights have the
names of framework=keras."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.keras.build import load_keras
from hvdtrain.frameworks.keras.objects import (
    added_loss,
    assigned_in_call,
    build_variables,
    check_and_describe,
    named_variables,
    users_object,
)
from hvdtrain.frameworks.torch.forward import AddsLoss
from hvdtrain.tasks.task import Task


def set_number_type(config: Config) -> None:
    """Called before a user's function creates a Keras model, so that its layers have the job's
    dtype."""
    load_keras(config.where("model.name"), _number_type(config))


def _number_type(config: Config) -> np.dtype[Any]:
    return np.dtype("float64" if config.speed.precision == "fp64" else "float32")


def as_module(model: Any, config: Config, task: Task) -> Any:
    """Returns a Keras model as a torch module; anything else unchanged. Raises UserError for a
    model of another backend."""
    keras = sys.modules["keras"]
    if not isinstance(model, keras.Model):
        return model
    where = config.where("model.name")
    if keras.backend.backend() != "torch":
        what = (
            f"the Keras model uses the backend {keras.backend.backend()}, but framework=torch "
            "needs torch"
        )
        raise UserError(what, where, "KERAS_BACKEND=torch; or framework=keras")
    if config.shard.stage == 3:
        what = (
            "shard.stage=3 replaces the tensors of weights, but Keras keeps its own "
            "references to them"
        )
        raise UserError(what, config.where("shard.stage"), "shard.stage=2")
    if config.optim.name == "muon":
        what = (
            "optim.name=muon expects the outputs of a matrix on its first axis, but Keras "
            "kernels have them on the last"
        )
        raise UserError(what, config.where("optim.name"), "framework=keras, or another optim.name")
    wanted = _number_type(config).name
    load_keras(where, _number_type(config))  # its operations use that dtype, too
    if wrong := {str(v.dtype) for v in model.trainable_variables} - {wanted}:
        what = f"the model computes in {', '.join(sorted(wrong))}, but the job in {wanted}"
        raise UserError(
            what,
            config.where("speed.precision"),
            f"keras.config.set_dtype_policy('{wanted}') before the model is created",
        )
    if task.transforms is not None:
        what = (
            f"the job passes {', '.join(task.transforms.each)} to the model, but a Keras model is "
            "called with one x"
        )
        raise UserError(
            what, where, "one field x, or a module of torch whose forward() has these parameters"
        )
    is_of_images = task.transform is not None and task.transform.is_of_images
    notes = check_and_describe(users_object(model, config), where)
    x = np.zeros((1, *task.sizes.get("shape", ())), np.float32)
    build_variables(model, config, x)
    assigned_in_call(model, where, x)
    _refuse_constraints(model, config)
    return KerasModule(model, is_of_images, notes)


def _refuse_constraints(model: Any, config: Config) -> None:
    """Raises UserError if an update would not see a full weight, or would not be the same on all
    ranks."""
    updates = [feature for feature in FEATURES if not feature.updates_whole_weights]
    for key in (feature.key for feature in updates if feature.on(config)):
        if name := next(
            (name for name, v in named_variables(model) if v.constraint is not None), None
        ):
            what = (
                f"{name} of the model has a constraint, which needs the whole weight on every "
                f"rank, but {key} divides it"
            )
            raise UserError(what, config.where(key), f"leave {key} out, or the constraint")


class KerasModule(AddsLoss):
    """Calls the model; the tensors of its variables are the parameters and buffers."""

    def __init__(self, model: Any, is_of_images: bool, notes: list[str]) -> None:
        """model: a built model; is_of_images: it is called with (n, channels, height, width);
        notes: header lines."""
        super().__init__()
        self.notes = notes
        # not a submodule, because its parameters have other names
        self._model: tuple[Any] = (model,)
        self._is_of_images = is_of_images
        drawn = {id(v) for v in model.variables} - {id(v) for v in model.weights}
        for name, variable in named_variables(model):
            if id(variable) not in drawn:
                self._register(name.split("."), variable)
        if any(p.device.type != "cpu" for p in self.parameters()):
            self.to("cpu")  # until the job moves it

    def _register(self, path: list[str], variable: Any) -> None:
        module: nn.Module = self
        for name in path[:-1]:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        if variable.trainable:
            module.register_parameter(path[-1], variable._value)
        else:
            variable._value = variable._value.detach()  # a buffer, which shares its memory
            module.register_buffer(path[-1], variable._value)

    def forward(self, x: torch.Tensor) -> Any:
        x = x.permute(0, 2, 3, 1) if self._is_of_images else x
        with _on(x):
            return self._model[0](x, training=self.training)

    def added_loss(self) -> torch.Tensor | float:
        model = self._model[0]
        first = next(self.parameters())
        with _on(first):
            loss: torch.Tensor | float = added_loss(model.losses)
        return loss

    @torch.no_grad()
    def constrain(self) -> None:
        for variable in self._model[0].trainable_variables:
            if variable.constraint is not None and variable.value.requires_grad:
                with _on(variable.value):
                    variable.assign(variable.constraint(variable))


def _on(tensor: torch.Tensor) -> Any:
    """Makes Keras create tensors on the device of this tensor within the context."""
    return sys.modules["keras"].device(str(tensor.device))

"""Builds the torch model of model.name, with its norms, initial weights, adapters and frozen
weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core import extras
from hvdtrain.errors import UserError, short
from hvdtrain.frameworks import by_name
from hvdtrain.frameworks.torch.check_outputs import check_outputs
from hvdtrain.frameworks.torch.foreign.counted import TooLarge, counted, most_bytes
from hvdtrain.frameworks.torch.foreign.downloads import watched
from hvdtrain.frameworks.torch.frozen import check_overlaps, freeze
from hvdtrain.tasks.task import Task

CPU = torch.device("cpu")
# of another framework, whose models on torch it makes torch modules
_ON_TORCH = "torch_module"


def normed_model(
    config: Config, task: Task, communicator: Communicator, device: torch.device = CPU
) -> torch.nn.Module:
    """Builds the model and applies norm.kind, model.classifier_std and model.recompute. device: the
    device on which it will be."""
    model = build_model(config, task)
    if config.model.classifier_std is not None:
        outputs = task.sizes.get("outputs", task.sizes.get("vocabulary", 0))
        init_classifier(
            model, outputs, config.model.classifier_std, config.where("model.classifier_std")
        )
    norm = config.norm
    if norm.kind != "batch":
        norms = extras.implementing_module(f"norm.kind={norm.kind}")
        model = norms.use_norm(model, norm.kind, norm.ghost, norm.statistics, communicator, device)
    if config.model.recompute != "none":
        from hvdtrain.frameworks.torch.recompute import recompute_blocks

        recompute_blocks(model, config.model.recompute, config.where("model.recompute"))
    check_overlaps(model, config.where("model.name"))
    if config.model.lora:
        _adapt(model, config, task)
    freeze(model, config.model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model.freeze={list(config.model.freeze)} leaves nothing to train",
            config.where("model.freeze"),
            "fewer names",
        )
    return model


def _adapt(model: nn.Module, config: Config, task: Task) -> None:
    """Adds adapters by the extra that does so. Raises UserError, also without that extra."""
    module = extras.implementation("model.lora")
    where = config.where("model.lora")
    extras.load(module, "adds adapters to a model", "model.lora", where).add_adapters(
        model, config, task
    )


def first_samples_of(model: torch.nn.Module) -> int:
    """Returns how many training samples model.begin_with(inputs) takes before the first step, its
    first_samples; 0 for a model without it."""
    return (
        int(getattr(model, "first_samples", 5000))
        if callable(getattr(model, "begin_with", None))
        else 0
    )


def check_first_samples(model: torch.nn.Module, config: Config) -> None:
    """Raises UserError if first_samples is not a count, or if rank 0 would have only a part of the
    weights that begin_with() computes."""
    count = (
        getattr(model, "first_samples", 1) if callable(getattr(model, "begin_with", None)) else 1
    )
    if not isinstance(count, int) or count < 1:
        what = f"first_samples of model.name={config.model.name} is {short(repr(count))}"
        raise UserError(
            what,
            config.where("model.name"),
            "a whole number of training samples for begin_with(), 1 or more",
        )
    keys = {
        "shard.stage": config.shard.stage == 3,
        "parallel": config.parallel.cuts,
    }
    for key in (key for key, cuts in keys.items() if cuts and first_samples_of(model)):
        what = f"begin_with() of model.name={config.model.name} needs whole weights on rank 0"
        raise UserError(
            what, config.where(key) if "." in key else key, f"leave {key} out, or shard.stage=2"
        )


def build_model(config: Config, task: Task) -> torch.nn.Module:
    """Builds a plugin of torch/models/ by name, or the user's package.module:Class. Raises
    UserError if it is not a trainable model."""
    name = config.model.name
    where = config.where("model.name")
    try:
        with watched(config), counted(most_bytes()):
            model: torch.nn.Module = _called(config, task)
    except TooLarge as error:
        fix = "fewer or smaller layers"
        if extras.implementation("shard.stage=3") is not None:
            fix += "; shard.stage=3 gives each rank a part of them"
        raise UserError(f"{name} has {error}", where, fix) from None
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{name} returned a {type(model).__name__}, not a torch.nn.Module",
            where,
            "give a class of modules, or another framework=",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        what = (
            f"the model is wrapped in {type(model).__name__}, but hvdtrain distributes samples "
            "and reduces gradients itself"
        )
        raise UserError(what, where, "pass the wrapped model: model.module")
    _refuse_hooks_on_parts(model, config)
    if "transformers" in sys.modules:
        from hvdtrain.frameworks.torch.of_transformers import pool_before, without_past

        without_past(model)
        for field in task.input_fields.values():
            if field.padding is not None and not field.is_mask and field.dtype == "int64":
                pool_before(model, int(field.padding.value))
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"{name} has no parameter to train",
            where,
            "give a model with parameters that require a gradient",
        )
    return model


def _called(config: Config, task: Task) -> Any:
    """Calls the plugin or the user's function; returns a model of another framework on torch as a
    torch module."""
    is_users_function = plugins.is_dotted(config.model.name) and config.model.given is None
    if is_users_function:
        plugins.own_function(config.model)  # imports that framework if needed
        for framework in plugins.of_imported_frameworks(_ON_TORCH):
            framework.set_number_type(config)
    model = by_name.build_model(config, task, "frameworks/torch/models")
    for framework in plugins.of_imported_frameworks(_ON_TORCH):
        model = framework.as_module(model, config, task)
    return model


def checked_model(config: Config, task: Task) -> torch.nn.Module:
    """Returns the model of one rank; a user's class is checked with a forward pass."""
    model = normed_model(config, task, SingleProcessCommunicator())
    if plugins.is_dotted(
        config.model.name
    ):  # plugins fit every task; a user's lazy layers get their shapes here
        check_outputs(model, config, task)
    return model


def init_classifier(model: nn.Module, classes: int, std: float, where: str) -> None:
    """Draws the weights of the last linear layer with `classes` outputs from N(0, std^2), and sets
    its bias to 0.

    Goyal 2017, arXiv:1706.02677, 5.1, use std 0.01. "Last" refers to the order in which the model's
    layers were created.

    Raises UserError if the model has no such layer.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    if not layers:
        what = (
            f"{type(model).__name__} has no linear layer with {classes} outputs, one for each class"
        )
        raise UserError(
            what, where, "leave model.classifier_std out, or end the model with an nn.Linear"
        )
    nn.init.normal_(layers[-1].weight, std=std)
    if layers[-1].bias is not None:
        nn.init.zeros_(layers[-1].bias)


def _refuse_hooks_on_parts(model: nn.Module, config: Config) -> None:
    """Raises UserError if parameters are replaced by their parts, without the hooks of their
    gradients."""
    key = "shard.stage" if config.shard.stage == 3 else "parallel"
    if (config.shard.stage == 3 or config.parallel.cuts) and (
        name := next((n for n, p in model.named_parameters() if p._backward_hooks), "")
    ):
        what = f"the model registers a gradient hook on {name}, but {key} divides it among ranks"
        raise UserError(
            what,
            config.where(key) if "." in key else key,
            "shard.stage=2, or a hook on a module's backward pass",
        )

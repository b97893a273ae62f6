"""assemble(): the learner of an arrangement, from its optimizer to its passes."""

from __future__ import annotations

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.ties import Ties
from hvdtrain.data.images.averaging import averaging_of
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.by_name import (
    build_rule,
    check_patterns,
    is_made_with_the_model,
    makes_groups,
)
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.forward import AddsLoss, Forward, TrainingModel
from hvdtrain.frameworks.torch.frozen import frozen_names, lines, ties_of
from hvdtrain.frameworks.torch.inputs import Inputs, use_channels_last
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.user_optimizer import construct_groups
from hvdtrain.frameworks.torch.precision import loss_scale
from hvdtrain.frameworks.torch.step import StepAddition
from hvdtrain.frameworks.torch.strategy import NamedParameters
from hvdtrain.tasks.task import DeviceAndDtype, part_of


def assemble(arrangement: Arrangement) -> TorchLearner:
    """Builds the learner of an arrangement, whose model is already checked and divided."""
    making = arrangement.making
    config = arrangement.making.config
    mesh = arrangement.making.mesh
    device = arrangement.making.device
    task = making.task
    precision = making.precision
    stopwatch = making.stopwatch
    assert task is not None, "a script's own model has no task"
    model = arrangement.model
    is_users_class = plugins.is_dotted(config.model.name)
    channels_last = use_channels_last(
        config.speed.channels_last, is_users_class, model, device, arrangement.keeps_memory_order
    )
    inputs = Inputs(task, device, precision.weights, channels_last)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    shapes = {name: tuple(p.shape) for name, p in named}
    ties = ties_of(model)
    notes = check_patterns(config, shapes, ties, lambda: frozen_names(model))
    notes += lines(model, config.model)
    optimizer = make_optimizer(config, named, ties)
    # before the strategy, so that hooks of additions run first and see the rank's local gradients
    additions = additions_of(config, mesh, model, parameters)
    strategy = arrangement.strategy(named, optimizer)
    body = arrangement.body
    when_empty = arrangement.when_empty
    wrapped = strategy.wrap(TrainingModel(body, when_empty), optimizer)
    if isinstance(model, AddsLoss):
        notes += model.notes
        wrapped.optimizer.register_step_post_hook(lambda *_: model.constrain())
    part = part_of(task, "torch", config, DeviceAndDtype(precision.weights, device))
    forward = Forward(
        wrapped.forward,
        body,
        inputs,
        precision,
        task,
        part,
        averaging_of(config, task.fields),
        when_empty,
    )
    scale = loss_scale(precision, device)
    passes = arrangement.passes(strategy, config, forward, scale, stopwatch, parameters, additions)
    return TorchLearner(
        config,
        mesh,
        model,
        forward,
        wrapped.optimizer,
        strategy,
        passes,
        scale,
        additions,
        stopwatch,
        not (strategy.waits_in_passes or arrangement.waits_in_norms),
        arrangement.all_orders,
        notes,
        making.hashes_on_device,
    )


def additions_of(
    config: Config, mesh: Mesh, model: torch.nn.Module, parameters: list[torch.nn.Parameter]
) -> list[StepAddition]:
    """Returns what the configured features add to a step; imports only these."""
    names = (feature.step_addition_in(config) for feature in FEATURES)
    return [plugins.named(name)(config, mesh, model, parameters) for name in names if name]


def make_optimizer(
    config: Config, named: NamedParameters, ties: Ties | None = None
) -> torch.optim.Optimizer:
    """Creates the optimizer of optim.name: a rule of hvdtrain, a class of torch.optim, or the
    result of a user's function."""
    name = config.optim.name
    if is_made_with_the_model(config):
        constructor = plugins.own_function(config.optim)
        if makes_groups(constructor):
            return construct_groups(constructor, named, config)
        return rule_optimizer.make_user_optimizer(constructor, name, named, config)
    return rule_optimizer.make_optimizer(
        build_rule(config, ties), named, config.optim.exclude == "norms_and_biases"
    )

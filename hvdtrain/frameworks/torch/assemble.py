"""A learner from a model that is on its device: the optimizer, the strategy, the inputs and the loss that belong to it."""

from __future__ import annotations

import torch

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.data.images.views import make_views
from hvdtrain.frameworks.by_name import build_rule, check_patterns
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.forward import Forward, TrainingModel
from hvdtrain.frameworks.torch.inputs import Inputs, use_channels_last
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters
from hvdtrain.frameworks.torch.precision import loss_scale
from hvdtrain.frameworks.torch.step import Meter, NoMeter
from hvdtrain.tasks.task import Place, part_of


def arrangement_of(config: Config) -> type[Arrangement]:
    """The one that the configuration asks for; it alone is imported."""
    if config.shard.stage == 3:
        from hvdtrain.frameworks.torch.rows import Rows  # half a second

        return Rows
    if config.parallel.ranks > 1:
        from hvdtrain.frameworks.torch.layers import Layers  # torch.distributed.pipelining: half a second

        return Layers
    if config.parallel.dense != "none":
        from hvdtrain.frameworks.torch.dense import Dense

        return Dense
    if config.servers.count:
        from hvdtrain.frameworks.torch.servers import Servers

        return Servers
    return Arrangement


def assemble(arrangement: Arrangement) -> TorchLearner:
    """The learner of an arrangement, whose model is checked and cut."""
    making, config, mesh, device = arrangement.making, arrangement.making.config, arrangement.making.mesh, arrangement.making.device
    task, precision, stopwatch = making.task, making.precision, making.stopwatch
    assert task is not None, "own_loop/ has a script's own model"
    model, is_users_class = arrangement.model, plugins.is_dotted(config.model.name)
    channels_last = use_channels_last(config.speed.channels_last, is_users_class, model, device, arrangement.keeps_memory_order)
    inputs = Inputs(task, device, precision.weights, channels_last)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    check_patterns(config, {name: tuple(p.shape) for name, p in named})
    optimizer = make_optimizer(config, named)
    meter: Meter | NoMeter = NoMeter()
    if config.log.noise_scale:  # before the strategy: the meter's hooks come first, and see a rank's own gradients
        meter = Meter(parameters, mesh.world)
    strategy = arrangement.strategy(named, optimizer)
    body, when_empty = arrangement.body, arrangement.when_empty
    wrapped = strategy.wrap(TrainingModel(body, when_empty), optimizer)
    part = part_of(task, "torch", config, Place(precision.weights, device))
    forward = Forward(wrapped.forward, body, inputs, precision, task, part, make_views(config, task.fields), when_empty)
    scale = loss_scale(precision, device)
    passes = arrangement.passes(strategy, config, forward, scale, stopwatch, parameters, meter)
    return TorchLearner(
        config, mesh, model, forward, wrapped.optimizer, strategy, passes, scale, meter, stopwatch, orders=arrangement.all_orders
    )


def make_optimizer(config: Config, named: NamedParameters) -> torch.optim.Optimizer:
    """The optimizer that optim.name means: one of our rules, or a class of torch.optim."""
    name, where = config.optim.name, config.where("optim.name")
    if plugins.is_dotted(name):
        return rule_optimizer.make_user_optimizer(plugins.load_dotted(name, where), name, named, config)
    return rule_optimizer.make_optimizer(build_rule(config), named, config.optim.exclude == "norms_and_biases")

"""A learner from a model that is on its device: the optimizer, the strategy, the inputs and the loss that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.same_order import SameOrder
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.pieces import Cut
from hvdtrain.data.images.views import make_views
from hvdtrain.frameworks.build_rule import build_rule, check_patterns
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch, Stopwatch
from hvdtrain.frameworks.torch.compile import compiled
from hvdtrain.frameworks.torch.cuda_stopwatch import stopwatch_for
from hvdtrain.frameworks.torch.forward import Forward, TrainingModel, WhenEmpty
from hvdtrain.frameworks.torch.gradients import Meter, NoMeter
from hvdtrain.frameworks.torch.inputs import Inputs, use_channels_last
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.parallel.dense.hybrid import HybridModel
from hvdtrain.frameworks.torch.parallel.divided import Divided
from hvdtrain.frameworks.torch.parallel.hybrid import Hybrid
from hvdtrain.frameworks.torch.parallel.parameter_server.select_role import server_or_worker
from hvdtrain.frameworks.torch.parallel.select_strategy import select_strategy
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Strategy
from hvdtrain.frameworks.torch.precision import Precision
from hvdtrain.tasks.task import Place, Task, part_of

if TYPE_CHECKING:  # half a second
    from hvdtrain.frameworks.torch.parallel.fsdp import ShardedModel
    from hvdtrain.frameworks.torch.parallel.pipeline.pipelined import Pipelined


def assemble(
    config: Config,
    task: Task,
    mesh: Mesh,
    model: torch.nn.Module,
    precision: Precision,
    device: torch.device,
    sharded: ShardedModel | None = None,
    cuts: Mapping[torch.nn.Parameter, Cut] = MappingProxyType({}),
    hybrid: HybridModel | None = None,
    pipelined: Pipelined | None = None,
    stopwatch: ReplaceableStopwatch | None = None,
    strategy_of: Callable[[Mesh, NamedParameters, Stopwatch], Strategy] | None = None,
    orders: Sequence[SameOrder] = (),
) -> TorchLearner:
    """The learner of a model that is on its device; `sharded`: of shard.stage=3; `cuts`: of parameters that ranks of a tensor group have
    in parts; `hybrid`: the model with its dense part cut over ranks; `pipelined`: of parallel.pipeline, whose parameters of other ranks
    lose their memory; `stopwatch`: the one that these enter; `strategy_of`: makes the strategy, in the place of what the configuration
    says; `orders`: in which ranks come to layers.
    """
    is_users_class = plugins.is_dotted(config.model.name)
    channels_last = use_channels_last(config.speed.channels_last, is_users_class, model, device, sharded is not None)
    inputs = Inputs(task, device, precision.weights, channels_last)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    check_patterns(config, {name: tuple(p.shape) for name, p in named})
    optimizer = make_optimizer(config, named)
    meter: Meter | NoMeter = NoMeter()
    if config.log.noise_scale:  # before the strategy: the meter's hooks come first, and see a rank's own gradients
        meter = Meter([p for _, p in named], mesh.world)
    stopwatch = stopwatch or ReplaceableStopwatch(stopwatch_for(device))
    strategy: Strategy
    if strategy_of:
        strategy = strategy_of(mesh, named, stopwatch)
    elif hybrid:
        strategy = Hybrid(config, mesh, named, hybrid, stopwatch)
    elif config.servers.count:
        strategy = server_or_worker(config, mesh, named, stopwatch)
    else:
        reduced = pipelined.updated(named) if pipelined else named
        strategy = sharded.strategy(config) if sharded else select_strategy(config, mesh, reduced, optimizer, stopwatch)
    if config.parallel.ranks > 1:
        strategy = Divided(strategy, mesh, [p for _, p in named], cuts, pipelined, config.parallel.sequence)
    body = hybrid or compiled(model, config.speed.compile)
    wrapped = strategy.wrap(TrainingModel(body, when_empty(config)), optimizer)
    part = part_of(task, "torch", config, Place(precision.weights, device))
    return TorchLearner(
        config=config,
        mesh=mesh,
        model=model,
        forward=Forward(wrapped.forward, body, inputs, precision, task, part, make_views(config, task.fields), when_empty(config)),
        optimizer=wrapped.optimizer,
        strategy=strategy,
        meter=meter,
        stopwatch=stopwatch,
        pipelined=pipelined,
        hybrid=hybrid,
        orders=orders,
    )


def when_empty(config: Config) -> WhenEmpty:
    """What a forward pass without samples does, which the collectives of the others may wait for."""
    if config.norm.kind == "sync" or config.parallel.dense != "none":
        return "call"
    return "call with zeros" if config.shard.stage == 3 else "skip"


def make_optimizer(config: Config, named: NamedParameters) -> torch.optim.Optimizer:
    """The optimizer that optim.name means: one of our rules, or a class of torch.optim."""
    name, where = config.optim.name, config.where("optim.name")
    if plugins.is_dotted(name):
        return rule_optimizer.make_user_optimizer(plugins.load_dotted(name, where), name, named, config)
    return rule_optimizer.make_optimizer(build_rule(config), named, config.optim.exclude == "norms_and_biases")

"""The torch framework: builds a rank's learner from the configuration."""

from __future__ import annotations

import os
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.seeds import fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.build_rule import build_rule
from hvdtrain.frameworks.learner import Learner, Task
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.threads import fair_threads
from hvdtrain.frameworks.torch import allocator
from hvdtrain.frameworks.torch.compile import check_compiler, compiled
from hvdtrain.frameworks.torch.cuda_stopwatch import stopwatch_for
from hvdtrain.frameworks.torch.device import check_shared, pick_device
from hvdtrain.frameworks.torch.forward import Forward, TrainingModel
from hvdtrain.frameworks.torch.gradients import Meter, NoMeter
from hvdtrain.frameworks.torch.inputs import Inputs, use_channels_last
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.loss import Loss
from hvdtrain.frameworks.torch.model import black, check_logits, checked_model, normed_model
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.parallel.select_strategy import select_strategy
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters
from hvdtrain.frameworks.torch.precision import pick_precision, refuse_tiny_images


def build(config: Config, task: Task, communicator: Communicator) -> Learner:
    """The learner of framework=torch. Every rank calls it.

    Raises UserError where the device, the model, the optimizer or the engine cannot do what the configuration asks for.
    """
    threads = fair_threads(communicator)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    device = pick_device(config, communicator)
    check_shared(device, communicator, config.where("speed.device"))
    if device.type == "cpu":
        allocator.keep()
    precision = pick_precision(config, device, communicator)
    check_compiler(config, device)
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, task, communicator).to(device=device, dtype=precision.weights)
    check_logits(model, config, task)
    refuse_tiny_images(model, black(2, task, next(model.parameters())), precision, config.where("speed.precision"))
    channels_last = use_channels_last(config.speed.channels_last, plugins.is_dotted(config.model.name), model, device)
    inputs = Inputs(task, device, precision.weights, channels_last)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(config, named)
    meter: Meter | NoMeter = NoMeter()
    if config.log.noise_scale:  # before the strategy: the meter's hooks come first, and see a rank's own gradients
        meter = Meter([p for _, p in named], communicator.size)
    stopwatch = ReplaceableStopwatch(stopwatch_for(device))
    strategy = select_strategy(config, communicator, named, optimizer, stopwatch)
    body = compiled(model, config.speed.compile)
    wrapped = strategy.wrap(TrainingModel(body, calls_empty=config.norm.kind == "sync"), optimizer)
    loss = Loss(config.model.loss == "squared_error", config.model.label_smoothing)
    return TorchLearner(
        config=config,
        rank=communicator.rank,
        model=model,
        forward=Forward(wrapped.forward, body, inputs, precision, loss),
        optimizer=wrapped.optimizer,
        strategy=strategy,
        meter=meter,
        stopwatch=stopwatch,
    )


def make_optimizer(config: Config, named: NamedParameters) -> torch.optim.Optimizer:
    """The optimizer that optim.name means: one of our rules, or a class of torch.optim."""
    name, where = config.optim.name, config.where("optim.name")
    if plugins.is_dotted(name):
        return rule_optimizer.make_user_optimizer(plugins.load_dotted(name, where), name, named, config)
    return rule_optimizer.make_optimizer(build_rule(config), named, config.optim.exclude == "norms_and_biases")


def check_optimizer(config: Config) -> None:
    """Raises UserError where build() would refuse the optimizer that optim.name means, whatever the model."""
    make_optimizer(config, [("weight", torch.nn.Parameter(torch.zeros(2, 2)))])


def figures() -> Any:
    """The module that `bench step` counts operations with; other commands do not import it."""
    from hvdtrain.frameworks.torch import flops

    return flops


def shapes(config: Config, task: Task) -> dict[str, tuple[int, ...]]:
    """The trained parameters by name, as build() makes them: without memory or work, unless the model reads its own numbers."""
    try:
        with torch.device("meta"):
            model = checked_model(config, task)
    except UserError:
        raise
    except Exception:  # a meta tensor has no numbers to read; any other error comes again
        model = checked_model(config, task)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}

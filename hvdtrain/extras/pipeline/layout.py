"""The stage of each layer of a pipeline, for the figure."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import shown_bytes
from hvdtrain.extras.pipeline.cuts import first_units
from hvdtrain.extras.pipeline.stages import units_of
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.check_outputs import example
from hvdtrain.frameworks.torch.layer import bytes_of_sample
from hvdtrain.tasks.task import Task


def stages_of_layers(model: nn.Module, config: Config, task: Task) -> tuple[dict[str, int], str]:
    """Returns the stage of each layer, and what a stage sends to the next one."""
    like = torch.empty(0)
    units = units_of(model, config.where("parallel.pipeline"))
    x = only_one(example(2, config, task, like))
    first = first_units(model, config, x, seconds_of=None)
    stage_of: dict[nn.Parameter, int] = {}
    for number, unit in enumerate(units):
        stage = sum(start <= number for start in first) - 1
        for module in unit.modules:
            for p in module.parameters():
                stage_of.setdefault(p, stage)
    x = only_one(example(2, config, task, like))
    with torch.no_grad():
        for unit in units[: first[1]]:
            x = unit.call(x)
    by_layer: dict[str, int] = {}
    for name, p in model.named_parameters():
        by_layer.setdefault(name.rpartition(".")[0] or name, stage_of[p])
    return (
        by_layer,
        f"activations, {shown_bytes(bytes_of_sample(x))} a sample; their gradients come back",
    )

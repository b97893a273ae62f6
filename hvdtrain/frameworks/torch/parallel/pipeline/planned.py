"""A pipeline of which one rank is planned: where its model is cut, and what comes to a stage, without numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.parallel.pipeline.cuts import balanced_cuts, given_cuts
from hvdtrain.frameworks.torch.parallel.pipeline.executor import form_of
from hvdtrain.frameworks.torch.parallel.pipeline.stages import units_of

Autocast = Callable[[torch.device], AbstractContextManager[Any]]


@torch.no_grad()
def planned_first_units(model: nn.Module, config: Config, x: torch.Tensor) -> list[int]:
    """The first units, see first_units(), for an x without numbers; that the units give what the model gives is not checked.

    Nothing is measured: with parallel.balance=seconds stages are cut by operations.
    """
    from torch.utils.flop_counter import FlopCounterMode  # as first_units() counts

    where, balance = config.where("parallel.pipeline"), config.parallel.balance
    units = units_of(model, where)
    found = balanced_cuts([0.0] * len(units), config.parallel.pipeline * config.parallel.stages_of_rank)  # refuses fewer units
    versions = {name: b._version for name, b in model.named_buffers()}
    costs = []
    for unit in units:
        with FlopCounterMode(display=False) as counter:
            x = unit.call(x)
        costs.append(float(counter.get_total_flops()))
    changed = [name for name, b in model.named_buffers() if b._version != versions[name]]
    if changed:
        what = f"training changes {changed[0]} of {type(model).__name__}, a buffer, which ranks of other stages would not have"
        raise UserError(what, where, "a model without batch norm: gpt, mlp; or parallel.pipeline=1")
    if isinstance(balance, list):
        return given_cuts(balance, [unit.name for unit in units], config.where("parallel.balance"))
    return balanced_cuts(costs, len(found))


@torch.no_grad()
def planned_forms(model: nn.Module, first: Sequence[int], x: torch.Tensor, autocast: Autocast) -> dict[str, np.ndarray]:
    """By name the messages that tell a stage what shape comes to it."""
    found = {}
    for number, unit in enumerate(units_of(model, "parallel.pipeline")):
        if number in first[1:]:
            found[f"pipeline.{list(first).index(number)}.form"] = form_of(x)
        with autocast(x.device):
            x = unit.call(x)
    return found

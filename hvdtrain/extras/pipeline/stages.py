"""Stages: a model as a sequence of units, cut into parts that ranks call one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.pipeline_unit import Unit

Autocast = Callable[[torch.device], AbstractContextManager[Any]]  # the autocast context of layers


@runtime_checkable
class HasUnits(Protocol):
    """A model that defines its units."""

    def pipeline_units(self) -> list[Unit]:
        """Returns the units in order; applied one after the other, they compute the model's
        output."""


class Stage(nn.Module):
    """Consecutive units of a model, using the model's modules."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._calls = [unit.call for unit in units]
        self.units = nn.ModuleList(module for unit in units for module in unit.modules)

    def forward(self, x: torch.Tensor) -> Any:
        for call in self._calls:
            x = call(x)
        return x


class Tied(NamedTuple):
    """A parameter that several stages use; each of their ranks has a copy."""

    name: str  # in the model, the first of its names
    parameter: nn.Parameter
    stages: tuple[int, ...]  # ascending


def units_of(model: nn.Module, where: str) -> list[Unit]:
    """Returns the units that the model defines, or the modules of a Sequential. Raises UserError
    for other models."""
    if isinstance(model, HasUnits):
        return list(model.pipeline_units())
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        # one may be there twice
        return [
            Unit(name, (module,), module)
            for name, module in model._modules.items()
            if module is not None
        ]
    what = f"{type(model).__name__} does not define where it can be divided into stages"
    fix = (
        "a model with pipeline_units() (docs/parallel.md), a torch.nn.Sequential, model.name=gpt "
        "or mlp"
    )
    raise UserError(what, where, fix)


def stages_of(model: nn.Module, cuts: Sequence[int], where: str) -> list[Stage]:
    """Returns the stages; stage i has the units from cuts[i] to the next cut. Raises UserError if a
    parameter is in no unit, because it would not be trained."""
    units = units_of(model, where)
    inside = {
        id(tensor)
        for unit in units
        for module in unit.modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in inside:
            what = f"{name} of {type(model).__name__} is in no unit, so no stage would have it"
            raise UserError(what, where, "name its module in pipeline_units()")
    stops = [*cuts[1:], len(units)]
    return [Stage(units[start:stop]) for start, stop in zip(cuts, stops, strict=True)]


def tied_parameters(model: nn.Module, stages: Sequence[Stage]) -> list[Tied]:
    """Returns the parameters that two or more stages use, in the order of the model."""
    users = [
        (
            name,
            p,
            tuple(i for i, stage in enumerate(stages) if any(p is q for q in stage.parameters())),
        )
        for name, p in model.named_parameters()
    ]
    return [Tied(name, p, used) for name, p, used in users if len(used) > 1]

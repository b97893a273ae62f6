"""Divides a model into stages: by parallel.balance, or so that the slowest stage has the fewest
operations or seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.pipeline.executor import DTYPES, MOST_AXES
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.extras.pipeline.schedule import Seconds
from hvdtrain.extras.pipeline.stages import units_of
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.device import fork_rng
from hvdtrain.frameworks.torch.pipeline_unit import Unit
from hvdtrain.frameworks.torch.private_api import tree_leaves


def first_units(
    model: nn.Module,
    config: Config,
    x: torch.Tensor,
    seconds_of: Callable[[Sequence[Unit]], Sequence[Seconds]] | None,
) -> list[int]:
    """Returns the first unit of each stage, the same on all ranks: by parallel.balance, or
    minimizing the operations or seconds of the slowest stage.

    x: (n, ...) inputs of the model. seconds_of: called on all ranks for parallel.balance=seconds;
    without it, operations are used. Raises UserError if the model has no units or fewer than
    stages, and like refuse_changed_buffers().
    """
    where = config.where("parallel.pipeline")
    parallel = PipelineKeys.of(config)
    balance = parallel.balance
    units = units_of(model, where)
    stages = parallel.pipeline * parallel.stages_of_rank
    balanced_cuts([0.0] * len(units), stages)  # rejects fewer units
    refuse_changed_buffers(model, x, where)
    operations = operations_of(units, model, x, where)
    if isinstance(balance, list):
        return given_cuts(balance, [unit.name for unit in units], config.where("parallel.balance"))
    if balance == "seconds" and seconds_of:
        return balanced_cuts([sum(each) for each in seconds_of(units)], stages)
    return balanced_cuts(operations, stages)


@torch.no_grad()
def planned_first_units(model: nn.Module, config: Config, x: torch.Tensor) -> list[int]:
    """Returns the first units like first_units(), for an x without data. Does not check that the
    units compute the same as the model.

    Nothing is measured; with parallel.balance=seconds, stages are cut by operations.
    """
    from torch.utils.flop_counter import FlopCounterMode  # counts like first_units()

    where = config.where("parallel.pipeline")
    parallel = PipelineKeys.of(config)
    balance = parallel.balance
    units = units_of(model, where)
    stages = parallel.pipeline * parallel.stages_of_rank
    balanced_cuts([0.0] * len(units), stages)  # rejects fewer units
    versions = {name: b._version for name, b in model.named_buffers()}
    costs = []
    for unit in units:
        with FlopCounterMode(display=False) as counter:
            x = unit.call(x)
        costs.append(float(counter.get_total_flops()))
    _refuse_changed(
        next((name for name, b in model.named_buffers() if b._version != versions[name]), ""),
        model,
        where,
    )
    if isinstance(balance, list):
        return given_cuts(balance, [unit.name for unit in units], config.where("parallel.balance"))
    return balanced_cuts(costs, stages)


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the first unit of each stage, minimizing the largest sum of costs in a stage.

    Each stage has one unit or more. Dynamic programming over the last cut: units^2 x stages steps.
    Raises UserError for fewer units than stages.
    """
    units = len(costs)
    if not 1 <= stages <= units:
        what = (
            f"a model of {units} units cannot be divided into {stages} stages: each stage "
            "needs at least one unit"
        )
        raise UserError(
            what,
            "parallel.pipeline, parallel.virtual",
            f"at most {units} stages in all, or a model with more layers",
        )
    sums = [0.0, *itertools.accumulate(costs)]
    slowest = list(sums)  # [stop]: of the units before `stop`, in the stages so far
    last_cuts: list[list[int]] = []
    for stage in range(1, stages):
        least = [float("inf")] * (units + 1)
        cuts = [0] * (units + 1)
        for stop in range(stage + 1, units + 1):
            for start in range(stage, stop):
                largest = max(slowest[start], sums[stop] - sums[start])
                if largest < least[stop]:
                    least[stop], cuts[stop] = largest, start
        slowest = least
        last_cuts.append(cuts)
    found = []
    stop = units
    for cuts in reversed(last_cuts):
        stop = cuts[stop]
        found.append(stop)
    return [0, *reversed(found)]


def given_cuts(balance: Sequence[int], names: Sequence[str], where: str) -> list[int]:
    """Returns the first unit of each stage, from the number of units in each. Raises UserError if
    they do not add up to all units, `names`."""
    if sum(balance) != len(names):
        what = (
            f"parallel.balance={list(balance)} has {sum(balance)} units, but the model has "
            f"{len(names)}: {', '.join(names)}"
        )
        raise UserError(
            what,
            where,
            f"{len(balance)} numbers with a sum of {len(names)}: hvdtrain plan --pipeline shows "
            "them",
        )
    return [0, *itertools.accumulate(balance[:-1])]


def refuse_changed_buffers(model: nn.Module, x: torch.Tensor, where: str) -> None:
    """Raises UserError for buffers that training changes, because buffers of another rank's stage
    would not be saved."""
    _refuse_changed(_changed_buffer(model, x), model, where)


def _refuse_changed(buffer: str, model: nn.Module, where: str) -> None:
    """Raises UserError if a buffer's name is given."""
    if buffer:
        what = (
            f"training changes the buffer {buffer} of {type(model).__name__}, which ranks of "
            "other stages would not have"
        )
        raise UserError(what, where, "a model without batch norm: gpt, mlp; or parallel.pipeline=1")


def _changed_buffer(model: nn.Module, x: torch.Tensor) -> str:
    """Returns the name of the first buffer that a forward pass in training mode changes, or an
    empty string; restores all buffers."""
    if not any(True for _ in model.buffers()):
        return ""
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    with copied_buffers(model), fork_rng([x.device]), torch.no_grad():
        model.train()(x)
        after = dict(model.named_buffers())
        return next((name for name, b in before.items() if not torch.equal(b, after[name])), "")


def operations_of(
    units: Sequence[Unit], model: nn.Module, x: torch.Tensor, where: str
) -> list[float]:
    """Returns the floating-point operations of matrix products and convolutions in each unit's
    forward pass.

    Raises UserError if the units in order do not compute the same as the model, or if a unit does
    not return a tensor (n, ...).
    """
    from torch.utils.flop_counter import FlopCounterMode  # a third of a second

    model.eval()
    operations = []
    if x.is_floating_point():  # not zeros: the model's outputs are compared
        x = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
            x
        )
    with torch.no_grad():
        # a copy, because the first layer may work in place
        expected = tree_leaves(model(x.clone()))
        for number, unit in enumerate(units):
            with FlopCounterMode(display=False) as counter:
                x = unit.call(x)
            operations.append(float(counter.get_total_flops()))
            if number < len(units) - 1 and not (
                isinstance(x, torch.Tensor) and x.dtype in DTYPES and 1 <= x.ndim <= MOST_AXES
            ):
                what = (
                    f"unit {unit.name} of {type(model).__name__} returns {_kind(x)}, which cannot "
                    "be sent to another stage"
                )
                raise UserError(
                    what, where, "units that each return one tensor (n, ...) (docs/parallel.md)"
                )
        given = tree_leaves(x)
    if len(given) != len(expected) or not all(map(_is_close, given, expected)):
        what = (
            f"the units of {type(model).__name__}, applied in order, return something else than "
            "its forward()"
        )
        raise UserError(
            what, where, "pipeline_units() with all that forward() does (docs/parallel.md)"
        )
    return operations


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def _is_close(given: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return isinstance(given, type(expected))
    return given.shape == expected.shape and torch.allclose(
        given, expected, rtol=1e-3, atol=1e-6, equal_nan=True
    )

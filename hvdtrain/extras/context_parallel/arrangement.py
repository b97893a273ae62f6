"""The arrangements of parallel.context: each rank has what it would have with data parallelism, and
computes its positions."""

from __future__ import annotations

from typing import Any, cast

import torch

from hvdtrain.comm.communicator import point_to_point
from hvdtrain.comm.order import SameOrder
from hvdtrain.comm.staging import KINDS
from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.core.own_line import own_line
from hvdtrain.data.packed import SEGMENTS, TOKENS
from hvdtrain.errors import UserError
from hvdtrain.extras.context_parallel.division import DivisionByPositions, Outside
from hvdtrain.extras.context_parallel.keys import ContextKeys
from hvdtrain.extras.context_parallel.link import ContextLink
from hvdtrain.extras.divided.divided_model import DividedModel
from hvdtrain.extras.divided.same_weights import take_from_rank_0
from hvdtrain.features.shards import fully_sharded
from hvdtrain.frameworks.torch.arrangement import Arrangement, Making
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import Called, call, each_of
from hvdtrain.frameworks.torch.forward import whole_outputs
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.private_api import BatchNorm
from hvdtrain.frameworks.torch.strategy import runs_ahead

# positions for which the divided model is compared with the whole one, and of them at least for
# each rank
CHECKED = 512
CHECKED_OF_RANK = 8


def divide_positions(arrangement: Arrangement) -> DivisionByPositions:
    """Divides the positions of each sample among the ranks of mesh.same_samples, in the model of
    an arrangement. Raises UserError if the model does not define how, or if it computes something
    else then. A collective."""
    making = arrangement.making
    model = arrangement.model
    where = making.config.where("parallel.context")
    ranks = making.mesh.same_samples
    is_real = making.planned is None
    order = _order(making)
    arrangement.orders = [*arrangement.orders, order]
    link = ContextLink(
        point_to_point(ranks, making.config.where("comm.engine")) if is_real else cast(Any, ranks),
        order,
        making.stopwatch if making.device.type == "cpu" else None,
    )
    _check_norms(model, where)
    by = ContextKeys.of(making.config).context_by
    if not is_real:
        return DivisionByPositions(model, link, by, where)
    inputs = _inputs(making)
    expected = whole_outputs(_outputs(model, inputs))
    division = DivisionByPositions(model, link, by, where)
    _check(model, division, inputs, expected, where)
    return division


class DividedPositions(Arrangement):
    """Divides the positions of each sample among the ranks of mesh.same_samples."""

    @property
    def waits_in_norms(self) -> bool:
        return super().waits_in_norms or self.making.device.type in KINDS

    @property
    def when_empty(self) -> Any:
        return self.without_samples


class WholeModelOfPositions(DividedPositions, WholeModel):
    """Each rank has the whole model (shard.stage=0, 1 and 2)."""

    def cut(self) -> None:
        if self.making.planned is None:
            take_from_rank_0(self.model, self.making.mesh)
        super().cut()
        divide_positions(self)


class DividedModelOfPositions(DividedPositions, DividedModel):
    """Each rank has its parts of the layers (parallel.tensor). DividedModel calls
    divide_positions()."""


class CutByPositions(DividedPositions):
    """Divides the positions after the model is cut."""

    def cut(self) -> None:
        super().cut()
        divide_positions(self)


def sharded_rows_of_positions(config: Config) -> type[Arrangement]:
    """Returns the arrangement in which each rank has its rows of every weight (shard.stage=3)."""
    rows: type[Arrangement] = named(fully_sharded(config).ARRANGEMENT)
    return type("ShardedRowsOfPositions", (CutByPositions, rows), {})


def _order(making: Making) -> SameOrder:
    ranks = making.mesh.same_samples
    fix = "the same layers on every rank that has positions of a sample"
    return SameOrder(
        ranks,
        making.mesh.world.rank,
        making.config.where("parallel.context"),
        fix,
        lags=runs_ahead(making.device, ranks),
    )


def _inputs(making: Making) -> Called:
    """Returns inputs of the model: some tokens, and of packed rows the segments."""
    task = making.task
    assert task is not None, "a custom loop does not divide positions"
    vocabulary: int = task.sizes["vocabulary"]
    checked = max(CHECKED, CHECKED_OF_RANK * making.mesh.same_samples.size)

    def numbers(x: torch.Tensor) -> torch.Tensor:
        x = x[:, :checked]
        at = torch.arange(x.numel(), device=x.device).view(x.shape)
        return (7 * at * at + 3 * at + 1) % vocabulary

    inputs = making.example()
    if isinstance(inputs, torch.Tensor):
        return numbers(inputs)
    found = cast(dict[str, torch.Tensor], each_of(inputs, lambda x: x[:, :checked]))
    for name, x in found.items():
        if name == TOKENS:
            found[name] = numbers(x)
        elif name == SEGMENTS:
            at = torch.arange(x.shape[1], device=x.device)
            found[name] = (1 + at // max(1, x.shape[1] // 3)).expand(x.shape).contiguous()
    return found


@torch.no_grad()
def _outputs(model: torch.nn.Module, inputs: Called) -> Any:
    with copied_buffers(model):
        return call(model.eval(), inputs)


def _check(
    model: torch.nn.Module,
    division: DivisionByPositions,
    inputs: Called,
    expected: Any,
    where: str,
) -> None:
    """Raises UserError if the divided model does not return the outputs of the whole one."""
    kind = type(model).__name__
    fix = "layers that compute each position by itself, except for those of the plan"
    try:
        with Outside(division, where):
            found = whole_outputs(_outputs(model, inputs))
    except UserError:
        raise
    except Exception as error:
        what = (
            f"{kind}, divided by its context_plan(), fails for the positions of a rank: "
            f"{type(error).__name__}: {error}"
        )
        raise UserError(what, f"{where}, context_plan(); {own_line(error)}", fix) from error
    for name, (module, way) in division.modules.items():
        if way == "attention" and name not in division.attended:
            what = (
                f"{name} of {kind}, a {type(module).__name__}, does not call "
                "torch.nn.functional.scaled_dot_product_attention(), so its positions cannot "
                "be divided"
            )
            other = "attention that calls it, or leave it out"
            raise UserError(what, f"{where}, context_plan()", other)
    is_same = found.shape == expected.shape and torch.allclose(
        found, expected, rtol=1e-2, atol=1e-4, equal_nan=True
    )
    if not is_same:
        what = f"{kind}, divided by its context_plan(), returns other outputs than the whole model"
        raise UserError(what, f"{where}, context_plan()", fix)


def _check_norms(model: torch.nn.Module, where: str) -> None:
    """Raises UserError for batch norm: in training, its statistics would only include the
    positions of a rank. The comparison with the whole model does not notice it, because it
    evaluates."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            what = (
                f"{name} of {type(model).__name__} is a {type(module).__name__}, whose statistics "
                "would only include the positions of a rank"
            )
            fix = "a norm of each position by itself, such as nn.LayerNorm"
            raise UserError(what, where, fix)

"""The arrangements of parallel.context: each rank has what it would have with data parallelism, and
computes its positions."""

from __future__ import annotations

from typing import Any, cast

import torch

from hvdtrain.comm.communicator import point_to_point
from hvdtrain.comm.order import SameOrder
from hvdtrain.comm.staging import KINDS
from hvdtrain.data.packed import SEGMENTS, TOKENS
from hvdtrain.errors import UserError
from hvdtrain.extras.context_parallel.division import DivisionByPositions, Outside
from hvdtrain.extras.context_parallel.keys import ContextKeys
from hvdtrain.extras.context_parallel.link import ContextLink
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import Called, call, each_of
from hvdtrain.frameworks.torch.forward import whole_outputs
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.parallel.zero_3.arrangement import ShardedRows
from hvdtrain.frameworks.torch.same_weights import take_from_rank_0
from hvdtrain.frameworks.torch.strategy import runs_ahead

CHECKED = 512  # positions for which the divided model is compared with the whole one


class DividedPositions(Arrangement):
    """Divides the positions of each sample among the ranks of mesh.same_samples."""

    def cut(self) -> None:
        """Divides the positions. Raises UserError if the model does not define how, or if it
        computes something else then. A collective."""
        super().cut()
        making = self.making
        config = making.config
        where = config.where("parallel.context")
        ranks = making.mesh.same_samples
        is_real = making.planned is None
        link = ContextLink(
            point_to_point(ranks, config.where("comm.engine")) if is_real else cast(Any, ranks),
            self._order() if is_real else None,
            making.stopwatch if making.device.type == "cpu" else None,
        )
        inputs = self._inputs() if is_real else None
        expected = None if inputs is None else self._outputs(inputs)
        division = DivisionByPositions(self.model, link, ContextKeys.of(config).context_by, where)
        if link.order is not None:
            self.orders = [*self.orders, link.order]
        if inputs is not None:
            self._check(division, inputs, expected)

    def _order(self) -> SameOrder:
        making = self.making
        ranks = making.mesh.same_samples
        fix = "the same layers on every rank that has positions of a sample"
        return SameOrder(
            ranks,
            making.mesh.world.rank,
            making.config.where("parallel.context"),
            fix,
            lags=runs_ahead(making.device, ranks),
        )

    def _inputs(self) -> Called:
        """Returns inputs of the model: some tokens, and of packed rows the segments."""
        task = self.making.task
        assert task is not None, "a custom loop does not divide positions"
        vocabulary: int = task.sizes["vocabulary"]

        def numbers(x: torch.Tensor) -> torch.Tensor:
            x = x[:, :CHECKED]
            at = torch.arange(x.numel(), device=x.device).view(x.shape)
            return (7 * at * at + 3 * at + 1) % vocabulary

        inputs = self.making.example()
        if isinstance(inputs, torch.Tensor):
            return numbers(inputs)
        found = cast(dict[str, torch.Tensor], each_of(inputs, lambda x: x[:, :CHECKED]))
        for name, x in found.items():
            if name == TOKENS:
                found[name] = numbers(x)
            elif name == SEGMENTS:
                at = torch.arange(x.shape[1], device=x.device)
                found[name] = (1 + at // max(1, x.shape[1] // 3)).expand(x.shape).contiguous()
        return found

    @torch.no_grad()
    def _outputs(self, inputs: Called) -> Any:
        with copied_buffers(self.model):
            return call(self.model.eval(), inputs)

    def _check(self, division: DivisionByPositions, inputs: Called, expected: Any) -> None:
        """Raises UserError if the divided model does not return the outputs of the whole one."""
        making = self.making
        where = making.config.where("parallel.context")
        kind = type(self.model).__name__
        with Outside(division, where):
            found = whole_outputs(self._outputs(inputs))
        for name, (module, way) in division.modules.items():
            if way == "attention" and name not in division.attended:
                what = (
                    f"{name} of {kind}, a {type(module).__name__}, does not call "
                    "torch.nn.functional.scaled_dot_product_attention(), so its positions cannot "
                    "be divided"
                )
                fix = "attention that calls it, or leave it out"
                raise UserError(what, f"{where}, context_plan()", fix)
        is_same = found.shape == expected.shape and torch.allclose(
            found, expected, rtol=1e-2, atol=1e-4, equal_nan=True
        )
        if not is_same:
            what = (
                f"{kind}, divided by its context_plan(), returns other outputs than the whole model"
            )
            fix = "layers that compute each position by itself, except for those of the plan"
            raise UserError(what, f"{where}, context_plan()", fix)

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


class ShardedRowsOfPositions(DividedPositions, ShardedRows):
    """Each rank has its rows of every weight (shard.stage=3)."""

"""TensorParts: the arrangement of parallel.tensor. Each rank of a group has a part of every
layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.frameworks.torch.arrangement import send_from_rank_0
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.frameworks.torch.parallel.divided import Divided
from hvdtrain.frameworks.torch.parallel.tensor.layers import give_whole_logits
from hvdtrain.frameworks.torch.parallel.tensor.layout import tensor_cuts
from hvdtrain.frameworks.torch.parallel.tensor.plan import (
    check_cut,
    cut_model,
    not_zeros,
    order_of_layers,
    outputs_of,
    plan_of,
)
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class TensorParts(WholeModel):
    """The arrangement of parallel.tensor."""

    divides = True

    def cut(self) -> None:
        """Divides the layers. Raises UserError if the model has no plan, or its parts compute
        something else."""
        self._divide(self._plan())

    def _plan(self) -> dict[str, str]:
        """Returns how each layer is divided; empty if none is."""
        config = self.making.config
        if config.parallel.tensor == 1:
            return {}
        return plan_of(self.model, config.where("parallel.tensor"))

    def _divide(self, plan: dict[str, str]) -> None:
        """Keeps this rank's parts of the layers, with rank 0's values. A collective."""
        self._cuts = dict[torch.nn.Parameter, Cut]()
        if self.making.planned is None:
            send_from_rank_0(self.model, self.making.mesh)
        if plan:
            self._cut_layers(plan)

    def _cut_layers(self, plan: dict[str, str]) -> None:
        making = self.making
        model = self.model
        where = self.making.config.where("parallel.tensor")
        has_numbers = making.planned is None
        x = not_zeros(only_one(making.example())) if has_numbers else None
        expected = outputs_of(model, x) if x is not None else None
        order: SameOrder = order_of_layers(making.config, making.mesh, making.device)
        self._cuts = cut_model(
            model, plan, making.mesh.tensor, where, making.config.parallel.sequence, order
        )
        model.register_forward_hook(
            lambda *_: order.end(
                "end of the forward pass", backward_follows=torch.is_grad_enabled()
            )
        )
        self.orders = [order]
        if making.user_model is not None:
            give_whole_logits(model)
        if x is not None:
            check_cut(model, x, expected, making.task, where)

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        return Divided(
            super().strategy(named, optimizer),
            self.making.mesh,
            [p for _, p in named],
            self._cuts,
            sequence=self.making.config.parallel.sequence,
        )

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, ranks: int, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        return tensor_cuts(model, config, layers)

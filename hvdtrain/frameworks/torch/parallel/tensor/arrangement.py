"""TensorParts: the arrangement of parallel.tensor. Each rank of a group has a part of every
layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.frameworks.torch.call import call, only_one
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.frameworks.torch.parallel.block_by_block import (
    BlockByBlock,
    make_block_by_block,
    start_bytes_of,
)
from hvdtrain.frameworks.torch.parallel.divided import Divided
from hvdtrain.frameworks.torch.parallel.tensor.layers import give_whole_logits
from hvdtrain.frameworks.torch.parallel.tensor.layout import tensor_cuts
from hvdtrain.frameworks.torch.parallel.tensor.plan import (
    TensorParallelLayers,
    check_cut,
    not_zeros,
    order_of_layers,
    outputs_of,
    plan_of,
)
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.same_weights import take_from_rank_0
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class TensorParts(WholeModel):
    """The arrangement of parallel.tensor."""

    divides = True

    def make(self) -> torch.nn.Module:
        """Creates the model, a large one block by block, so that no rank holds all its weights."""
        making = self.making
        self._blocks: BlockByBlock | None = None
        if making.planned is not None or making.user_model is not None:
            model = super().make()
            self.start_bytes = start_bytes_of(model) if making.planned is not None else 0
            return model
        device = making.device
        dtype = making.precision.weights
        made = make_block_by_block(making.new_model, device, dtype, making.mesh.world, self._run)
        if isinstance(made, BlockByBlock):
            self._blocks = made
            return made.model
        return made.to(device=device, dtype=dtype)

    @torch.no_grad()
    def _run(self, model: torch.nn.Module) -> None:
        """Runs the forward passes that cut() needs."""
        call(model.eval(), self.making.example())

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
        if self._blocks is None and self.making.planned is None:
            take_from_rank_0(self.model, self.making.mesh)
        if plan:
            self._cut_layers(plan)
        if self._blocks is not None:
            self._blocks.end()
            here = self._parameters_here()
            placed = self._blocks.place(lambda p: p in here)
            self._cuts = {placed[p]: cut for p, cut in self._cuts.items()}

    def _parameters_here(self) -> Collection[torch.nn.Parameter]:
        """Returns the parameters that this rank has completely or in part."""
        return set(self.model.parameters())

    def _cut_layers(self, plan: dict[str, str]) -> None:
        making = self.making
        model = self.model
        where = self.making.config.where("parallel.tensor")
        has_numbers = making.planned is None
        x = not_zeros(only_one(making.example())) if has_numbers else None
        if self._blocks is not None:
            self._blocks.begin(agreed=True)
        expected = outputs_of(model, x) if x is not None else None
        if self._blocks is not None:
            self._blocks.end()
        order: SameOrder = order_of_layers(making.config, making.mesh, making.device)
        layers = TensorParallelLayers(
            model, plan, making.mesh.tensor, where, making.config.parallel.sequence, order
        )
        layers.cut(model)
        self._cuts = layers.cuts
        model.register_forward_hook(
            lambda *_: order.end(
                "end of the forward pass", backward_follows=torch.is_grad_enabled()
            )
        )
        self.orders = [order]
        if making.user_model is not None:
            give_whole_logits(model)
        if self._blocks is not None:
            self._blocks.cut(
                {part: (whole, layers.cuts[part]) for whole, part in layers.parts.items()}
            )
            self._blocks.begin(agreed=True)
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

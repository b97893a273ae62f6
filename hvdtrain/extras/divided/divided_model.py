"""DividedModel: the arrangement of ranks that share one model, with parts of its layers each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.extras.divided.block_by_block import (
    BlockByBlock,
    make_block_by_block,
    start_bytes_of,
)
from hvdtrain.extras.divided.communicators import timed_making
from hvdtrain.extras.divided.divided import Divided
from hvdtrain.extras.divided.divisions import layer_division_of, sample_division_of
from hvdtrain.extras.divided.layer_division import LayerDivision
from hvdtrain.extras.divided.same_weights import take_from_rank_0
from hvdtrain.frameworks.torch.arrangement import Making, SampleDivision
from hvdtrain.frameworks.torch.call import call, only_one
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.frameworks.torch.parallel.whole_model import WholeModel
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class DividedModel(WholeModel):
    """The arrangement of ranks that share one model, with parts of its layers each."""

    divides = True
    samples: SampleDivision | None = None  # where ranks also divide each sample

    def __init__(self, making: Making) -> None:
        super().__init__(timed_making(making))

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
        """Divides the layers. Raises UserError if the model does not define how, or if its parts
        compute something else."""
        self._divide(self._division())

    def _division(self) -> type[LayerDivision] | None:
        """Returns how layers are divided; None if every rank has whole layers. Raises UserError if
        the model does not define it."""
        division = layer_division_of(self.making.config)
        if division is not None:
            division.check_model(self.model, self.making.config)
        return division

    def _divide(self, division: type[LayerDivision] | None) -> None:
        """Keeps this rank's parts of the layers, with rank 0's values. A collective."""
        self._cuts = dict[torch.nn.Parameter, Cut]()
        if self._blocks is None and self.making.planned is None:
            take_from_rank_0(self.model, self.making.mesh)
        if division is not None:
            self._cut_layers(division)
        if self.making.mesh.same_samples.size > 1:
            if self._blocks is not None:
                self._blocks.begin(agreed=True)
            self.samples = sample_division_of(self.making.config)(self)
        if self._blocks is not None:
            self._blocks.end()
            here = self._parameters_here()
            placed = self._blocks.place(lambda p: p in here)
            self._cuts = {placed[p]: cut for p, cut in self._cuts.items()}

    def _parameters_here(self) -> Collection[torch.nn.Parameter]:
        """Returns the parameters that this rank has completely or in part."""
        return set(self.model.parameters())

    def _cut_layers(self, division: type[LayerDivision]) -> None:
        making = self.making
        model = self.model
        has_numbers = making.planned is None
        x = not_zeros(only_one(making.example())) if has_numbers else None
        if self._blocks is not None:
            self._blocks.begin(agreed=True)
        expected = outputs_of(model, x) if x is not None else None
        if self._blocks is not None:
            self._blocks.end()
        layers = division(model, making.config, making.mesh, making.device)
        layers.cut(model)
        self._cuts = dict(layers.cuts)
        order = layers.order
        model.register_forward_hook(
            lambda *_: order.end(
                "end of the forward pass", backward_follows=torch.is_grad_enabled()
            )
        )
        self.orders = [order]
        if making.user_model is not None:
            division.give_whole_outputs(model)
        if self._blocks is not None:
            self._blocks.cut(
                {part: (whole, layers.cuts[part]) for whole, part in layers.parts.items()}
            )
            self._blocks.begin(agreed=True)
        if x is not None:
            layers.check(x, expected, making.task)

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        return Divided(
            super().strategy(named, optimizer),
            self.making.mesh,
            [p for _, p in named],
            self._cuts,
            sequence=self.making.config.parallel.divides_positions,
        )

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, ranks: int, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        division = layer_division_of(config)
        return {} if division is None else division.layout_cuts(model, config, layers)


def not_zeros(x: torch.Tensor) -> torch.Tensor:
    """Returns nonzero numbers with the shape, dtype and device of x, the same on all ranks; tokens
    are returned unchanged."""
    return (
        torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
        if x.is_floating_point()
        else x
    )


@torch.no_grad()
def outputs_of(model: torch.nn.Module, x: torch.Tensor) -> Any:
    return model.eval()(x)

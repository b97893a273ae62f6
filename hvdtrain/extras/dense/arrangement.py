"""Dense: the arrangement of parallel.dense. Every rank has the convolutions, and its part of the
dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.extras.dense.hybrid import Hybrid, HybridModel
from hvdtrain.extras.dense.keys import DenseKeys
from hvdtrain.extras.dense.layout import dense_cuts
from hvdtrain.extras.dense.passes import DenseUpdates
from hvdtrain.extras.divided.communicators import timed, timed_making
from hvdtrain.extras.divided.same_weights import take_from_rank_0
from hvdtrain.frameworks.torch.arrangement import Arrangement, Making
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.frameworks.torch.step import Passes
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class Dense(Arrangement):
    """The arrangement of parallel.dense: every rank has the convolutions, and its part of the dense
    layers."""

    divides = True
    divides_state = True
    without_samples = "call"

    def __init__(self, making: Making) -> None:
        super().__init__(timed_making(making))

    def cut(self) -> None:
        """Divides the dense part. Raises UserError if the model does not name one that can be
        divided."""
        making = self.making
        config = self.making.config
        scheme = DenseKeys.of(self.making.config).dense
        assert scheme != "none", "arrangement_of() asks for it"
        if making.planned is None:
            take_from_rank_0(self.model, making.mesh)
        world = (
            timed(making.mesh.world, making.stopwatch)
            if making.device.type == "cpu"
            else making.mesh.world
        )
        self._hybrid = HybridModel(self.model, world, scheme, config.where("parallel.dense"))

    @property
    def body(self) -> torch.nn.Module:
        return self._hybrid

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        # a custom loop sets it later
        batch = None if self.making.user_model is not None else self.making.config.batch.size
        return Hybrid(
            self.making.config, self.making.mesh, named, self._hybrid, self.making.stopwatch, batch
        )

    def passes(self, strategy: Strategy, *of_passes: Any) -> Passes:
        if DenseKeys.of(self.making.config).dense_updates == 1:
            return super().passes(strategy, *of_passes)
        return DenseUpdates(*of_passes, model=self._hybrid, strategy=strategy)

    @classmethod
    def layout_ways(cls, config: Config) -> list[str]:
        return [f"parallel.dense={DenseKeys.of(config).dense}"]

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, ranks: int, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        return dense_cuts(model, config, ranks, layers)

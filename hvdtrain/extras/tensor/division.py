"""TensorLayers: the layers of a model that the ranks of a tensor group have in parts, as its
tensor_plan() says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.extras.tensor.keys import TensorKeys
from hvdtrain.extras.tensor.layers import give_whole_logits
from hvdtrain.extras.tensor.layout import tensor_cuts
from hvdtrain.extras.tensor.plan import (
    TensorParallelLayers,
    check_cut,
    order_of_layers,
    plan_of,
)
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.tasks.task import Task


class TensorLayers(TensorParallelLayers):
    """The LayerDivision of parallel.tensor."""

    def __init__(
        self, model: torch.nn.Module, config: Config, mesh: Mesh, device: torch.device
    ) -> None:
        self._where = config.where("parallel.tensor")
        self.order = order_of_layers(config, mesh, device)
        sequence = TensorKeys.of(config).sequence
        plan = plan_of(model, self._where)
        super().__init__(model, plan, mesh.tensor, self._where, sequence, self.order)

    @classmethod
    def check_model(cls, model: torch.nn.Module, config: Config) -> None:
        plan_of(model, config.where("parallel.tensor"))

    @staticmethod
    def give_whole_outputs(model: torch.nn.Module) -> None:
        give_whole_logits(model)

    def check(self, x: torch.Tensor, expected: Any, task: Task | None) -> None:
        check_cut(self._model, x, expected, task, self._where)

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        return tensor_cuts(model, config, layers)

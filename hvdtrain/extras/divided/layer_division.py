"""LayerDivision: the layers of a model that the ranks of mesh.tensor have in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.tasks.task import Task


class LayerDivision(Protocol):
    """Layers of a model that are replaced in place by a rank's parts. A feature names the class
    (JobFeature.layer_division)."""

    order: SameOrder  # checks that the ranks compute the layers in the same order
    parts: Mapping[torch.nn.Parameter, torch.nn.Parameter]  # whole parameter -> its part
    cuts: Mapping[torch.nn.Parameter, Cut]  # of the parts; other parameters remain replicated
    names: Mapping[str, Cut]  # the same by name; a shared parameter has several

    def __init__(
        self, model: torch.nn.Module, config: Config, mesh: Mesh, device: torch.device
    ) -> None:
        """The model is the same on all ranks of mesh.tensor. Raises UserError if it cannot be
        divided, before anything is changed."""

    @classmethod
    def check_model(cls, model: torch.nn.Module, config: Config) -> None:
        """Raises UserError if the model does not define how its layers are divided."""

    def cut(self, unit: torch.nn.Module) -> None:
        """Cuts the layers inside of `unit`, a module of the model or the model itself."""

    @staticmethod
    def give_whole_outputs(model: torch.nn.Module) -> None:
        """Makes a divided model return the outputs of all ranks, for user-defined losses."""

    def check(self, x: torch.Tensor, expected: Any, task: Task | None) -> None:
        """Raises UserError if the divided model does not return the outputs of the whole model for
        x, or if its task has no loss for its outputs. A collective."""

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        """For a picture: the layers that are divided, by name."""

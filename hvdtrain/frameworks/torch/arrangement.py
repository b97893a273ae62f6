"""Arrangement: how the ranks of a job have its model, from the making of it to the strategy and the passes of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.comm.features import Feature
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.same_order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.compile import compiled
from hvdtrain.frameworks.torch.forward import WhenEmpty
from hvdtrain.frameworks.torch.model import example, normed_model
from hvdtrain.frameworks.torch.norm.sync import orders_of_norms
from hvdtrain.frameworks.torch.parallel.select_strategy import select_strategy
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Strategy
from hvdtrain.frameworks.torch.precision import Precision
from hvdtrain.frameworks.torch.step import Passes
from hvdtrain.tasks.task import Task


class Making(NamedTuple):
    """What a model is made from, and for."""

    config: Config
    task: Task
    mesh: Mesh
    device: torch.device
    precision: Precision
    stopwatch: ReplaceableStopwatch  # that passes and collectives enter
    planned: frozenset[Feature] | None = None  # the features of an engine: tensors have no numbers then, and no rank is connected

    def example(self) -> torch.Tensor:
        """What the model is called with for two samples of zeros."""
        return example(2, self.config, self.task, self.like)

    @property
    def like(self) -> torch.Tensor:
        """Has the device of the inputs and the number type of the weights."""
        return torch.empty(0, dtype=self.precision.weights, device=self.device)


class Arrangement:
    """This class: each rank has the whole model. Others say what they do differently.

    Every rank makes one, checks its model as a whole, and calls cut().
    """

    orders: Sequence[SameOrder] = ()  # in which ranks come to layers
    keeps_memory_order = False  # of the weights
    without_samples: WhenEmpty = "skip"  # what a forward pass does then: the collectives of the other ranks may wait for it

    def __init__(self, making: Making) -> None:
        self.making = making
        self.model = self.make()

    def make(self) -> torch.nn.Module:
        """The model on its device, by whose samples of zeros it is checked."""
        making = self.making
        model = normed_model(making.config, making.task, making.mesh.world)
        if making.planned is None:
            return model.to(device=making.device, dtype=making.precision.weights)
        _cast(model, making.precision.weights)
        return model

    def cut(self) -> None:
        """Leaves this rank its part. A collective where there are parts."""

    @property
    def body(self) -> torch.nn.Module:
        """What a pass calls."""
        return compiled(self.model, self.making.config.speed.compile)

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        """The strategy of the trained parameters; the optimizer is as the configuration says, and the strategy has not wrapped it yet."""
        return select_strategy(self.making.config, self.making.mesh, named, optimizer, self.making.stopwatch)

    def passes(self, strategy: Strategy, *of_passes: Any) -> Passes:
        """of_passes: what Passes is made of."""
        return Passes(*of_passes)

    @property
    def all_orders(self) -> list[SameOrder]:
        """With those of its norms, which a plan leaves out."""
        return [*self.orders, *(orders_of_norms(self.model) if self.making.planned is None else ())]

    @property
    def when_empty(self) -> WhenEmpty:
        return "call" if self.making.config.norm.kind == "sync" else self.without_samples


@torch.no_grad()
def send_from_rank_0(model: torch.nn.Module, mesh: Mesh) -> None:
    """Gives every rank the weights and buffers that rank 0's model has, before it keeps a part of them. A collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel():
            host = tensor.detach().cpu().contiguous()
            found = mesh.world.broadcast(host.view(-1).view(torch.uint8), "weights")
            tensor.copy_(found.view(tensor.dtype).view(tensor.shape))


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """What model.to(dtype) does, which fails for fake tensors."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)

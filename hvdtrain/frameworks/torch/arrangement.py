"""Arrangement: how a model is distributed among ranks, from its creation to the strategy and the
passes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from hvdtrain.comm.engines import Feature
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementing_module
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.call import Called, any_of, each_of
from hvdtrain.frameworks.torch.check_outputs import example
from hvdtrain.frameworks.torch.device import compiled
from hvdtrain.frameworks.torch.forward import WhenEmpty
from hvdtrain.frameworks.torch.model import normed_model
from hvdtrain.frameworks.torch.precision import Precision
from hvdtrain.frameworks.torch.step import Passes
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy
from hvdtrain.tasks.task import Task

if TYPE_CHECKING:  # imports for pictures and for custom loops
    from hvdtrain.frameworks.torch.layer import Layer, LayerCut
    from hvdtrain.frameworks.torch.loop_passes import LoopPasses


class UserModel(NamedTuple):
    """A script's model, used instead of model.name."""

    model: torch.nn.Module  # on its device, in the number type of its weights
    # (n, ...), its inputs, on its device; None: the script has passed none
    inputs: Called | None

    def example(self, count: int | None, config: Config) -> Called:
        """Returns `count` rows of the inputs, repeated if necessary; None: all rows. Raises
        UserError if the script has passed no inputs."""
        if self.inputs is None:
            by = config.parallel.cut_by
            key = f"parallel.{by}" if by else "shard.stage"
            fix = (
                "model, optimizer = ctx.prepare(model, optimizer, example=x), x: the model's "
                "inputs for some samples"
            )
            raise UserError(
                f"{key} needs an example of the model's inputs",
                f"ctx.prepare(), {config.where(key)}",
                fix,
            )
        one = any_of(self.inputs)
        rows = torch.arange(count or len(one), device=one.device) % len(one)
        return each_of(self.inputs, lambda x: x[rows])


class Making(NamedTuple):
    """The inputs for the creation of a model."""

    config: Config
    task: Task | None  # None of the model of a script
    mesh: Mesh
    device: torch.device
    precision: Precision
    stopwatch: ReplaceableStopwatch  # receives the phases of passes and collectives
    planned: frozenset[Feature] | None = (
        None  # the features of an engine: tensors have no numbers then, and no rank is connected
    )
    user_model: UserModel | None = None
    hashes_on_device: bool = False  # digests of weights, on the GPU of every rank
    prefix: str = ""  # begins the names of collectives, where a script has several models

    def example(self, count: int = 2) -> Called:
        """Returns inputs of the model for `count` samples: zeros, or a script's inputs."""
        if self.user_model is not None:
            return self.user_model.example(count, self.config)
        assert self.task is not None, "the script has given no model"
        return example(count, self.config, self.task, self.like)

    def new_model(self) -> torch.nn.Module:
        """Creates the model of model.name."""
        assert self.task is not None, "the script has given its model"
        return normed_model(self.config, self.task, self.mesh.world, self.device)

    @property
    def like(self) -> torch.Tensor:
        """Has the device of the inputs and the number type of the weights."""
        return torch.empty(0, dtype=self.precision.weights, device=self.device)


class SampleDivision(Protocol):
    """A model whose modules compute a rank's part of each sample. The model itself does so when it
    is called. A pipeline calls its units instead, with these functions."""

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the model's inputs (n, ...), for the first stage. Later
        stages get parts of samples with the shape of the last call."""

    def outputs_of_part(self, outputs: Any) -> Any:
        """Returns the outputs of the last stage as the model would return them."""


class Arrangement:
    """The base class replicates the model on every rank; subclasses override what differs.

    Every rank creates one, checks the complete model, and calls cut().
    """

    orders: Sequence[SameOrder] = ()  # check that ranks reach layers in the same order
    keeps_memory_order = False  # whether weights keep their memory order
    divides = False  # a rank has, or updates, a part of the weights
    # ranks shard the optimizer state of replicated layers, as with shard.stage=1
    divides_state = False
    without_samples: WhenEmpty = (
        # what a forward pass does then, because the collectives of other ranks may wait for it
        "skip"
    )

    # for a plan: the most memory that weights and buffers take on a rank before they are
    # partitioned
    start_bytes = 0

    def __init__(self, making: Making) -> None:
        self.making = making
        self.model = self.make()

    def make(self) -> torch.nn.Module:
        """Creates the model on its device, and checks it with samples of zeros."""
        making = self.making
        if making.user_model is not None:
            return making.user_model.model
        model = making.new_model()
        if making.planned is None:
            return model.to(device=making.device, dtype=making.precision.weights)
        _cast(model, making.precision.weights)
        self.start_bytes = bytes_of(model)
        return model

    def cut(self) -> None:
        """Keeps this rank's part of the model. A collective if there are parts."""

    @property
    def body(self) -> torch.nn.Module:
        """Returns the module that a pass calls."""
        return compiled(self.model, self.making.config.speed.compile)

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        """Returns the strategy of the trained parameters. The optimizer is not wrapped yet; the
        strategy wraps it."""
        return Strategy(named)

    def passes(self, strategy: Strategy, *of_passes: Any) -> Passes:
        """Returns the passes. of_passes: the arguments of Passes."""
        return Passes(*of_passes)

    def loop_passes(self, forward: torch.nn.Module) -> LoopPasses:
        """Returns the passes of a custom loop; forward: the model as the strategy wrapped it."""
        from hvdtrain.frameworks.torch.loop_passes import LoopPasses

        return LoopPasses(forward)

    @classmethod
    def check_predictable(cls, config: Config) -> None:
        """Raises UserError if the memory of its ranks cannot be predicted."""

    @classmethod
    def layout_ways(cls, config: Config) -> list[str]:
        """For a picture: how the model is distributed over ranks, as in a configuration."""
        return [config.parallel.summary()] if config.parallel.ranks > 1 else []

    @classmethod
    def layout_stages(
        cls, model: torch.nn.Module, config: Config, task: Task
    ) -> tuple[dict[str, int], str]:
        """For a picture: the stage of each layer, and what a stage sends to the next one."""
        return {}, ""

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, ranks: int, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        """For a picture: the layers that are partitioned over ranks, by name."""
        return {}

    @classmethod
    def layout_notes(cls, config: Config) -> list[str]:
        """For a picture: what people must know to read it."""
        return []

    @classmethod
    def time_of_passes(
        cls,
        config: Config,
        micro: int,
        seconds: Sequence[tuple[float, float]],
        transfers: Sequence[float],
    ) -> tuple[float, float]:
        """For a plan of ranks with consecutive layers: the seconds of the passes of a step, and the
        share of them in which a rank waits, 0 to 1.

        micro: micro-batches. seconds: of a forward and a backward pass of one of them through each
        stage. transfers: seconds of a message to each stage.
        """
        raise AssertionError(f"{cls.__name__} has no stages")

    @property
    def all_orders(self) -> list[SameOrder]:
        """Returns all orders, including the order of norms, which a plan omits."""
        if not self.waits_in_norms or self.making.planned is not None:
            return [*self.orders]
        norms = implementing_module("norm.kind=sync")
        return [*self.orders, *norms.orders_of_norms(self.model)]

    @property
    def waits_in_norms(self) -> bool:
        """Whether passes wait for the statistics of other ranks."""
        return self.making.config.norm.kind == "sync"

    @property
    def when_empty(self) -> WhenEmpty:
        return "call" if self.waits_in_norms else self.without_samples


def bytes_of(model: torch.nn.Module) -> int:
    """Returns the bytes of the model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts the model; model.to(dtype) fails for fake tensors."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)

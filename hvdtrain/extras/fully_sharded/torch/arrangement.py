"""ShardedRows: the arrangement of shard.stage=3. Each rank has its rows of every weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.engines import Feature
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.divided.blocks import units
from hvdtrain.extras.divided.communicators import timed_making
from hvdtrain.extras.divided.deferred import make_deferred
from hvdtrain.extras.divided.divided import Divided
from hvdtrain.extras.divided.divisions import layer_division_of
from hvdtrain.extras.fully_sharded.torch.gathered_types import REDUCES_UNREACHED
from hvdtrain.extras.fully_sharded.torch.planned import PlannedMesh
from hvdtrain.extras.fully_sharded.torch.process_group import start_process_group
from hvdtrain.extras.fully_sharded.torch.strategy import (
    ShardedModel,
    device_mesh,
    local_part,
    shard_model,
)
from hvdtrain.frameworks.torch.arrangement import Arrangement, Making, bytes_of
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import call
from hvdtrain.frameworks.torch.layer import Layer, LayerCut
from hvdtrain.frameworks.torch.private_api import unset_fake_temporarily
from hvdtrain.frameworks.torch.strategy import NamedParameters, Strategy


class ShardedRows(Arrangement):
    """The arrangement of shard.stage=3: each rank has its rows of every weight."""

    divides = True
    keeps_memory_order = True
    without_samples = "call with zeros"

    def __init__(self, making: Making) -> None:
        super().__init__(timed_making(making))

    def make(self) -> torch.nn.Module:
        self._sharded = (
            self._made() if self.making.planned is None else self._planned(self.making.planned)
        )
        return self._sharded.model

    def _made(self) -> ShardedModel:
        """Creates the model with rank 0's weights, one unit at a time, so that no rank ever has all
        weights.

        Raises UserError for a parameter that is a single number, because it has no rows. Before
        torch 2.13 it also raises it for tensor groups on an engine without torch's process groups.
        """
        config = self.making.config
        mesh = self.making.mesh
        device = self.making.device
        precision = self.making.precision
        if "ddp" not in mesh.world.features:
            if (
                config.parallel.ranks > 1 and not REDUCES_UNREACHED
            ):  # its DeviceMesh creates its own groups; tried with 2.9.1
                key = f"parallel.{config.parallel.cut_by}"
                what = (
                    f"shard.stage=3 with {key} does not start on this engine with torch "
                    f"{torch.__version__}"
                )
                raise UserError(
                    what,
                    config.where(key),
                    "torch 2.13 or newer; or comm.engine=torchdist; or shard.stage=2",
                )
            start_process_group(mesh.world)
        user_model = self.making.user_model
        model, deferred = (
            make_deferred(self.making.new_model) if user_model is None else (user_model.model, None)
        )
        groups = device_mesh(mesh, device)
        communicating = self.making.stopwatch.communicating
        sharded = shard_model(
            model, deferred, config, mesh, groups, device, precision.weights, communicating
        )
        division = layer_division_of(config)
        if user_model is not None and division is not None:
            division.give_whole_outputs(sharded.model)
        if deferred is None and user_model is None:
            return sharded._replace(
                summary=f"{sharded.summary}, made whole first: its constructor reads its own "
                "numbers"
            )
        return sharded

    def _planned(self, features: frozenset[Feature]) -> ShardedModel:

        config = self.making.config
        mesh = self.making.mesh
        device = self.making.device
        precision = self.making.precision
        with unset_fake_temporarily():  # torch reads the numbers of ranks
            ranks = PlannedMesh(mesh.data, features)
        model = self.making.new_model()
        blocks = list(map(bytes_of, units(model)))
        rest = bytes_of(model) - sum(blocks)
        sharded = shard_model(model, None, config, mesh, ranks, device, precision.weights)
        # models are created in float32
        scale = precision.weights.itemsize / torch.float32.itemsize
        own = sum(local_part(p).nbytes for p in sharded.model.parameters())
        self.start_bytes = own + int(scale * max([rest, *blocks]))
        return sharded

    def cut(self) -> None:
        """Gathers weights in 16 bits from now on if layers compute so; called after the checks of
        the model."""
        if self.making.precision.layers is not None:
            with copied_buffers(self.model):
                inputs = self.making.example()
                making = self.making
                self._sharded = self._sharded.for_autocast(
                    lambda model: call(model, inputs), making.device, making.precision.layers
                )
        self.orders = self._sharded.orders

    def strategy(self, named: NamedParameters, optimizer: torch.optim.Optimizer) -> Strategy:
        config = self.making.config
        mesh = self.making.mesh
        strategy = self._sharded.strategy(self.making.config)
        if config.parallel.ranks == 1:
            return strategy
        return Divided(
            strategy,
            mesh,
            [p for _, p in named],
            dict(self._sharded.cuts),
            None,
            config.parallel.divides_positions,
        )

    @classmethod
    def layout_cuts(
        cls, model: torch.nn.Module, config: Config, ranks: int, layers: Sequence[Layer]
    ) -> dict[str, LayerCut]:
        division = layer_division_of(config)
        return {} if division is None else division.layout_cuts(model, config, layers)

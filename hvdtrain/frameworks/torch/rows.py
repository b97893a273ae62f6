"""Rows: the arrangement of shard.stage=3, in which each rank has its rows of every weight; of ranks
that are planned, too."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from hvdtrain.comm.communicator import Communicator, Op
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.process_group import CommunicatorGroup, start_process_group
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.call import call
from hvdtrain.frameworks.torch.parallel.buffers import copied_buffers
from hvdtrain.frameworks.torch.parallel.deferred import make_deferred
from hvdtrain.frameworks.torch.parallel.divided import Divided
from hvdtrain.frameworks.torch.parallel.fsdp import ShardedModel, device_mesh, shard_model
from hvdtrain.frameworks.torch.parallel.gathered_types import REDUCES_UNREACHED
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Strategy
from hvdtrain.frameworks.torch.parallel.tensor.layers import give_whole_logits


class Rows(Arrangement):
    """The arrangement of shard.stage=3: each rank has its rows of every weight."""

    keeps_memory_order = True
    without_samples = "call with zeros"

    def make(self) -> torch.nn.Module:
        self._sharded = (
            self._made() if self.making.planned is None else self._planned(self.making.planned)
        )
        return self._sharded.model

    def _made(self) -> ShardedModel:
        """With the weights that rank 0's has: unit by unit, so that no rank has all of them at a
        time.

        Raises UserError for a parameter that is a single number, which has no rows, and for tensor
        groups on an engine without torch's own process groups before torch 2.13.
        """
        config = self.making.config
        mesh = self.making.mesh
        device = self.making.device
        precision = self.making.precision
        if "ddp" not in mesh.world.features:
            if (
                mesh.tensor.size > 1 and not REDUCES_UNREACHED
            ):  # its DeviceMesh makes groups of its own; tried with 2.9.1
                what = (
                    "shard.stage=3 with parallel.tensor does not start on this engine with torch "
                    f"{torch.__version__}"
                )
                raise UserError(
                    what,
                    config.where("parallel.tensor"),
                    "torch 2.13 or newer; or comm.engine=torchdist; or shard.stage=2",
                )
            start_process_group(mesh.world)
        given = self.making.given
        model, deferred = (
            make_deferred(self.making.new_model) if given is None else (given.model, None)
        )
        groups = device_mesh(mesh, device)
        communicating = self.making.stopwatch.communicating
        sharded = shard_model(
            model, deferred, config, mesh, groups, device, precision.weights, communicating
        )
        if given is not None:
            give_whole_logits(sharded.model)
        if deferred is None and given is None:
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
        return shard_model(
            self.making.new_model(), None, config, mesh, ranks, device, precision.weights
        )

    def cut(self) -> None:
        """Weights travel in 16 bits from now on where layers compute so: behind the passes that
        have checked the model."""
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
        found = self._sharded.strategy(self.making.config)
        if config.parallel.ranks == 1:
            return found
        return Divided(
            found,
            mesh,
            [p for _, p in named],
            dict(self._sharded.cuts),
            None,
            config.parallel.sequence,
        )


class PlannedMesh(DeviceMesh):
    """Rank 0 of the ranks of a communicator. It needs no default process group, of which a process
    has one at most: that of its job."""

    def __init__(self, communicator: Communicator, features: frozenset[Feature]) -> None:
        """features: of the engine; where it has process groups of its own, collectives copy nothing
        beside FSDP2's buffers."""
        ranks = list(range(communicator.size))
        if "_rank" in signature(DeviceMesh.__init__).parameters:
            as_rank: dict[str, Any] = {"_rank": 0}
            super().__init__(
                "cpu", ranks, mesh_dim_names=("shard",), _init_backend=False, **as_rank
            )
        else:  # torch 2.9 asks the default process group for the rank
            plain: Any = self
            plain.device_type = "cpu"
            plain.mesh = torch.tensor(ranks, dtype=torch.int)
            plain.mesh_dim_names = ("shard",)
            plain._flatten_mesh_list = tuple(ranks)
            plain._thread_id = None
            plain._coordinate_on_dim = [0]
        self._group = (_NothingCopied if "ddp" in features else CommunicatorGroup)(
            communicator, "planned"
        )

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self._group


class _NothingCopied(CommunicatorGroup):
    """Stands for a group of torch's own, which reads and writes FSDP2's buffers in place."""

    def _start_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
        return _nothing

    def _start_reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Any
    ) -> Callable[[], None]:
        return _nothing

    def _start_allreduce(self, tensor: torch.Tensor, op: Op, divisor: int) -> Callable[[], None]:
        return _nothing


def _nothing() -> None:
    pass

"""PlannedMesh: the ranks of shard.stage=3 in a process that only plans for them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hvdtrain.comm.communicator import Communicator, Op
from hvdtrain.comm.engines import Feature
from hvdtrain.extras.fully_sharded.torch.process_group import CommunicatorGroup


class PlannedMesh(DeviceMesh):
    """A device mesh of a communicator's ranks, seen from rank 0. It needs no default process group:
    a process has at most one, and that belongs to its job."""

    def __init__(self, communicator: Communicator, features: frozenset[Feature]) -> None:
        """features: of the engine; if it has torch's process groups, collectives copy nothing
        besides FSDP2's buffers."""
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
    """Stands for one of torch's process groups, which reads and writes FSDP2's buffers in place."""

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

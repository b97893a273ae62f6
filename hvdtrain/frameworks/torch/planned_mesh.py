"""PlannedMesh: FSDP2's ranks in a prediction, of which none is connected."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.features import Feature
from hvdtrain.comm.process_group import CommunicatorGroup


class PlannedMesh(DeviceMesh):
    """Rank 0 of the ranks of a communicator. It needs no default process group, of which a process has one at most: that of its job."""

    def __init__(self, communicator: Communicator, features: frozenset[Feature]) -> None:
        """features: of the engine; where it has process groups of its own, collectives copy nothing beside FSDP2's buffers."""
        ranks = list(range(communicator.size))
        super().__init__("cpu", ranks, mesh_dim_names=("shard",), _init_backend=False, _rank=0)
        has_own = "ddp" in features
        self._group = FakeProcessGroup._create_internal(0, len(ranks)) if has_own else CommunicatorGroup(communicator, "planned")

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self._group

"""PlannedMesh: FSDP2's ranks in a prediction, of which none is connected."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup
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
        self._group = _fake_group(len(ranks)) if has_own else CommunicatorGroup(communicator, "planned")

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self._group


def _fake_group(size: int) -> ProcessGroup:
    """Rank 0 of a group whose collectives do nothing. FSDP2 calls methods of ProcessGroup that a backend alone has not."""
    group = ProcessGroup(0, size)  # type: ignore[call-arg]  # the stub lacks this form
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, FakeProcessGroup._create_internal(0, size))
    return group

"""PlannedCommunicator: ranks that do not exist, in a process that only plans for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from hvdtrain.comm.communicator import (
    Buffer,
    Communicator,
    CompletedHandle,
    Handle,
    SingleProcessCommunicator,
    part_of,
)
from hvdtrain.comm.counted import Moved, counted
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.mesh import (
    Coordinates,
    Mesh,
    coordinates,
    mesh_of_layers,
    one_group,
    shared_samples,
)
from hvdtrain.config.schema import Config


class PlannedCommunicator(SingleProcessCommunicator):
    """One of `size` ranks; of rank 0 parts are the largest. Each collective takes the memory that
    the engine takes for it."""

    name = "planned"
    local_rank = 0

    def __init__(self, size: int, features: frozenset[Feature], rank: int = 0) -> None:
        """`features`: the features of the engine."""
        self.rank = rank
        self.size = size
        self.local_size = size
        self.messages: dict[
            str, np.ndarray
        ] = {}  # results of start_recv() by name; other names receive arbitrary values
        self._gathers_into_new_memory = "horovod_api" in features
        # with which strategies call the libraries themselves
        self.features = features - {
            "horovod_api",
            "ddp",
        }

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        return x[part_of(len(x), self.rank, self.size)]

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(x[part_of(len(x), self.rank, self.size)])

    def start_spread(self, x: Buffer, name: str) -> Handle:
        return _Gathered(x) if self._gathers_into_new_memory else CompletedHandle(x)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return (
            x.new_empty((len(x) * self.size, *x.shape[1:]))
            if hasattr(x, "new_empty")
            else x.repeat(self.size, axis=0)
        )

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing] * self.size

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        return CompletedHandle(x)

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        if name in self.messages:
            x[...] = self.messages[name]
        return CompletedHandle(x)

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return None

    def abort(self, code: int) -> NoReturn:
        raise AssertionError("no rank is connected")


def planned_mesh(
    config: Config, ranks: int, features: frozenset[Feature], stage: int, moved: list[Moved]
) -> Mesh:
    """Returns the mesh of this number of ranks for the first rank in a pipeline stage; its messages
    are appended to `moved`."""
    tensor = config.parallel.part_ranks
    readers = ranks // config.parallel.ranks
    own = coordinates(stage * readers * tensor, readers, tensor)

    def group(color: Callable[[Coordinates], int]) -> Communicator:
        members = [
            rank for rank in range(ranks) if color(coordinates(rank, readers, tensor)) == color(own)
        ]
        found = PlannedCommunicator(len(members), features, members.index(stage * readers * tensor))
        return counted(found, moved, members)

    world = group(lambda _: 0)
    of_layers = config.parallel.ranks > 1
    mesh = mesh_of_layers(world, config, group) if of_layers else one_group(world)
    return shared_samples(mesh, config.parallel, group)


class _Gathered:
    """A Handle: the gathered parts lie in new memory until they are copied."""

    def __init__(self, x: Buffer) -> None:
        self._x = x
        self._gathered = x.new_empty(x.shape)

    def wait(self) -> Buffer:
        return self._x

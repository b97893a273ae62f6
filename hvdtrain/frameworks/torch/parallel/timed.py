"""A communicator whose collectives count as the phase "communication" of a step, wherever in a pass they are.

For tensors in host memory: what a GPU computes is not done when its collective is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from hvdtrain.comm.communicator import Buffer, Communicator, Handle, Op
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch

Communicating = Callable[[], AbstractContextManager[None]]


def timed(communicator: Communicator, stopwatch: ReplaceableStopwatch) -> Communicator:
    return _Timed(communicator, stopwatch.communicating)


def timed_mesh(mesh: Mesh, config: Config, device: torch.device, stopwatch: ReplaceableStopwatch) -> Mesh:
    """The mesh, whose groups that cut layers work in are timed where the host waits in them."""
    if device.type != "cpu" or not config.parallel.cuts:
        return mesh
    return mesh._replace(tensor=timed(mesh.tensor, stopwatch), parts=timed(mesh.parts, stopwatch))


class _TimedHandle:
    def __init__(self, handle: Handle, communicating: Communicating) -> None:
        self._handle, self._communicating = handle, communicating

    def wait(self) -> Buffer:
        with self._communicating():
            return self._handle.wait()


class _Timed:
    """The communicator that it is given, with every wait of a collective timed."""

    def __init__(self, communicator: Communicator, communicating: Communicating) -> None:
        self._within, self._communicating = communicator, communicating
        self.name, self.features = communicator.name, communicator.features
        self.rank, self.size = communicator.rank, communicator.size
        self.local_rank, self.local_size = communicator.local_rank, communicator.local_size

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        with self._communicating():
            return self._within.allreduce(x, name, op)

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        with self._communicating():  # an engine that is not "asynchronous" waits here
            return self._timed(self._within.start_allreduce(x, name, op))

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        with self._communicating():
            return self._within.broadcast(x, name, root)

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        with self._communicating():
            return self._timed(self._within.start_broadcast(x, name, root))

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        with self._communicating():
            return self._timed(self._within.start_reduce(x, name, root))

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        with self._communicating():
            return self._within.reduce_scatter(x, name)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        with self._communicating():
            return self._timed(self._within.start_reduce_scatter(x, name))

    def start_spread(self, x: Buffer, name: str) -> Handle:
        with self._communicating():
            return self._timed(self._within.start_spread(x, name))

    def allgather(self, x: Buffer, name: str) -> Buffer:
        with self._communicating():
            return self._within.allgather(x, name)

    def allgather_object(self, thing: Any) -> list[Any]:
        with self._communicating():
            return self._within.allgather_object(thing)

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        with self._communicating():
            return self._within.broadcast_object(thing, root)

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return self._within.side_channel_gather(message, wait_s)

    def split(self, color: int | None) -> Communicator | None:
        return self._within.split(color)

    def abort(self, code: int) -> NoReturn:
        self._within.abort(code)

    def close(self) -> None:
        self._within.close()

    def _timed(self, handle: Handle) -> Handle:
        return _TimedHandle(handle, self._communicating)

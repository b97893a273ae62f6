"""A communicator for a step whose waiting counts as the phase "communication"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdtrain.comm.communicator import AroundCommunicator, Buffer, Communicator, Handle
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch

Communicating = Callable[[], AbstractContextManager[None]]


def timed(communicator: Communicator, stopwatch: ReplaceableStopwatch) -> Communicator:
    """Returns a communicator whose collectives count as the phase "communication" of a step.

    For tensors in host memory only: on a GPU, a collective is called before the computation has
    ended.
    """
    result: Any = _Timed(communicator, stopwatch.communicating)
    return result


def timed_mesh(
    mesh: Mesh, config: Config, device: torch.device, stopwatch: ReplaceableStopwatch
) -> Mesh:
    """Returns the mesh with timed communicators for divided layers, if the host waits in them."""
    if device.type != "cpu" or not config.parallel.cuts:
        return mesh
    return mesh._replace(tensor=timed(mesh.tensor, stopwatch), parts=timed(mesh.parts, stopwatch))


class _TimedHandle:
    def __init__(self, handle: Handle, communicating: Communicating) -> None:
        self._handle = handle
        self._communicating = communicating

    def wait(self) -> Buffer:
        with self._communicating():
            return self._handle.wait()


class _Timed(AroundCommunicator):
    """Wraps a communicator and times every wait of a collective; groups of split() are not
    timed."""

    def __init__(self, within: Communicator, communicating: Communicating) -> None:
        super().__init__(within)
        self._communicating = communicating

    def pass_on(self, collective: str, x: Buffer, name: str, *more: Any) -> Any:
        with self._communicating():  # an engine that is not "asynchronous" waits here
            found = super().pass_on(collective, x, name, *more)
        return (
            _TimedHandle(found, self._communicating) if collective.startswith("start_") else found
        )

    def allgather_object(self, thing: Any) -> list[Any]:
        with self._communicating():
            objects: list[Any] = self.within.allgather_object(thing)
        return objects

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        with self._communicating():
            return self.within.broadcast_object(thing, root)

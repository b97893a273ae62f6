"""A communicator for a step whose waiting counts as the phase "communication"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.comm.communicator import AroundCommunicator, Buffer, Communicator, Handle
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Making

Communicating = Callable[[], AbstractContextManager[None]]


def timed(communicator: Communicator, stopwatch: ReplaceableStopwatch) -> Communicator:
    """Returns a communicator whose collectives count as the phase "communication" of a step.

    For tensors in host memory only: on a GPU, a collective is called before the computation has
    ended.
    """
    result: Any = _Timed(communicator, stopwatch.communicating)
    return result


def timed_making(making: Making) -> Making:
    """Returns the inputs of an arrangement whose ranks share one model, with timed communicators,
    if the host waits in them; a custom loop does not time its steps."""
    is_timed = making.device.type == "cpu" and making.config.parallel.cuts
    if not is_timed or making.user_model is not None:
        return making
    mesh = making.mesh
    return making._replace(
        mesh=mesh._replace(
            tensor=timed(mesh.tensor, making.stopwatch), parts=timed(mesh.parts, making.stopwatch)
        )
    )


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

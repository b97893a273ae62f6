"""The way of a tensor in a GPU's memory to a collective of MPI and back, beside what the GPU
computes; streams and events of torch.

MPI knows no streams: it may touch memory only once the GPU has filled it, which the thread that
calls MPI waits for, and no other one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hvdtrain.comm.communicator import Buffer
from hvdtrain.comm.device_memory import DeviceArray, Way

Stream = Any  # torch.cuda.Stream
Event = Any  # torch.cuda.Event
ALL = slice(None)
_HALF = (torch.float16, torch.bfloat16)


class Cuda:
    """Streams, which are queues of a GPU's work, and page-locked memory of the host, which a GPU
    copies to and from by itself."""

    kind = "cuda"  # of torch.device; ROCm's too

    def present(self, device: torch.device) -> Stream:
        """The stream that this thread gives work to."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, it is the present stream of this thread, and its device the present one."""
        return torch.cuda.stream(stream)

    def mark(self, stream: Stream) -> Event:
        """What the stream has been given until now, for a thread that waits for it: asleep, not in
        a loop."""
        return stream.record_event(torch.cuda.Event(blocking=True))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Its memory is not used again before the stream has done what it has been given until
        then."""
        tensor.record_stream(stream)

    def locked(self, like: torch.Tensor) -> torch.Tensor:
        """Page-locked memory for the numbers of a tensor, any numbers in it. torch keeps what is
        freed for the next one."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


class Ways:
    """The ways of one communicator, whose collectives take tensors on GPUs."""

    def __init__(self, gpus: Cuda, way: Way) -> None:
        self._gpus = gpus
        self._way = way
        self._streams: dict[tuple[torch.device, str], Stream] = {}

    def takes(self, x: Buffer) -> bool:
        """Whether it is a tensor on a GPU."""
        return isinstance(x, torch.Tensor) and x.device.type == self._gpus.kind

    def begin(self, x: torch.Tensor, needed: slice = ALL, *, reduces: bool = False) -> Moving:
        """By the thread that starts a collective of x, behind what its present stream has been
        given until now.

        needed: the rows that this rank gives to it. Sums of 16-bit numbers are made in host memory:
        MPI has no such type.
        """
        if self._way == "device" and not (reduces and x.dtype in _HALF):
            return Direct(self._gpus, x, self._stream(x.device, "MPI's"))
        return Staged(
            self._gpus,
            x,
            needed,
            self._stream(x.device, "to the host"),
            self._stream(x.device, "from the host"),
        )

    def _stream(self, device: torch.device, name: str) -> Stream:
        if (device, name) not in self._streams:
            self._streams[device, name] = self._gpus.new(device)
        return self._streams[device, name]


class Moving(Protocol):
    """A tensor on its way: run() by the thread that calls MPI, then finish() of what that returned,
    by the thread that waits."""

    def run(self, collective: Callable[[Any], Any]) -> Any: ...

    def finish(self, found: Any) -> torch.Tensor: ...


class Direct:
    """MPI gets the address of the tensor."""

    def __init__(self, gpus: Cuda, x: torch.Tensor, stream: Stream) -> None:
        """stream: of what is allocated for the collective: nothing else is given to it."""
        self._gpus = gpus
        self._x = x
        self._stream = stream
        self._filled = gpus.mark(gpus.present(x.device))

    def run(self, collective: Callable[[Any], Any]) -> torch.Tensor:
        self._filled.synchronize()
        with self._gpus.use(self._stream):
            found = collective(DeviceArray(self._x.detach(), self._stream.synchronize)).tensor
        return (
            self._x
            if found.data_ptr() == self._x.data_ptr() and found.shape == self._x.shape
            else found
        )

    def finish(self, found: torch.Tensor) -> torch.Tensor:
        """MPI has put the result where it belongs before it returned."""
        self._gpus.keep(found, self._gpus.present(found.device))
        return found


class Staged:
    """MPI gets a copy in page-locked host memory, which the GPU makes on a stream of its own."""

    def __init__(
        self, gpus: Cuda, x: torch.Tensor, needed: slice, down: Stream, up: Stream
    ) -> None:
        self._gpus = gpus
        self._x = x
        self._up = up
        filled = gpus.present(x.device).record_event()
        self._host = gpus.locked(x)
        source = x.detach()
        into = self._host
        if x.ndim:
            into = into[needed]
            source = source[needed]
        down.wait_event(filled)
        with gpus.use(down):
            into.copy_(source, non_blocking=True)
        gpus.keep(x, down)
        self._copied = gpus.mark(down)

    def run(self, collective: Callable[[Any], Any]) -> tuple[torch.Tensor, Event]:
        """The result, which is on the GPU behind the event."""
        self._copied.synchronize()
        found = collective(self._host)
        with self._gpus.use(self._up):
            result = self._place(found)
            result.detach().copy_(found, non_blocking=True)
            self._gpus.keep(self._x, self._up)
            return result, self._up.record_event()

    def _place(self, found: torch.Tensor) -> torch.Tensor:
        """Where x has what the host's copy of it has in `found`; new memory for what is no part of
        that."""
        if found is self._host:
            return self._x
        if found.untyped_storage().data_ptr() != self._host.untyped_storage().data_ptr():
            return self._x.new_empty(found.shape)
        start = found.storage_offset()
        return self._x.detach().view(-1)[start : start + found.numel()].view(found.shape)

    def finish(self, found: tuple[torch.Tensor, Event]) -> torch.Tensor:
        """The thread's present stream goes on behind the copy."""
        result, copied = found
        self._gpus.present(result.device).wait_event(copied)
        self._gpus.keep(result, self._gpus.present(result.device))
        return result

"""Copies a tensor from GPU memory to an MPI collective and back while the GPU computes, with
torch's streams and events.

MPI does not know streams, so it must not access memory before the GPU has filled it. Only the
thread that calls MPI waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch

from hvdtrain.comm.communicator import Buffer
from hvdtrain.comm.device_memory import DeviceArray, Way

Stream = Any  # torch.cuda.Stream, torch.xpu.Stream
Event = Any
Kind = Literal["cuda", "xpu"]  # types of torch.device; ROCm's GPUs are also cuda
KINDS: tuple[Kind, ...] = get_args(Kind)
ALL = slice(None)
_HALF = (torch.float16, torch.bfloat16)


def kind_of_build() -> Kind:
    """Returns the kind of GPUs that this torch is built for; cuda if it is built for CPUs."""
    device = torch.accelerator.current_accelerator()
    return next((kind for kind in KINDS if device is not None and device.type == kind), "cuda")


class Accelerator:
    """Streams, the queues of a GPU's work, and page-locked host memory, which a GPU copies to and
    from by itself."""

    def __init__(self, kind: Kind) -> None:
        self.kind: str = kind
        self._torch = torch.get_device_module(kind)  # torch.cuda, torch.xpu

    def present(self, device: torch.device) -> Stream:
        """Returns the current stream of this thread."""
        return self._torch.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        return self._torch.Stream(device)

    def set_device(self, device: torch.device) -> None:
        """Makes the GPU the current one of this thread permanently.

        A new thread begins with GPU 0. Leaving a stream of another GPU would select GPU 0 again,
        and create a context there, some 500 MB for every rank of the host.
        """
        self._torch.set_device(device)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Within the context, makes the stream and its device the current ones of this thread. Does
        not create a context on the previously current device."""
        with torch.accelerator.device_index(stream.device.index), self._torch.stream(stream):
            yield

    def mark(self, stream: Stream) -> Event:
        """Records an event after the stream's current work; with CUDA, a thread waits for it
        asleep, not in a loop."""
        options = {"blocking": True} if self.kind == "cuda" else {}
        return stream.record_event(self._torch.Event(**options))

    def timed_mark(self, stream: Stream) -> Event:
        """Records an event that knows its time behind the stream's present work."""
        return stream.record_event(self._torch.Event(enable_timing=True))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keeps the tensor's memory from being reused before the stream has finished its present
        work."""
        tensor.record_stream(stream)

    def locked(self, like: torch.Tensor) -> torch.Tensor:
        """Returns uninitialized page-locked memory of a tensor's size. torch keeps freed memory for
        the next tensor."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


class Ways:
    """Lets the collectives of one communicator take tensors on GPUs."""

    def __init__(self, gpus: Accelerator, way: Way) -> None:
        self._gpus = gpus
        self._way = way
        self._streams: dict[tuple[torch.device, str], Stream] = {}

    def takes(self, x: Buffer) -> bool:
        """Whether it is a tensor on a GPU."""
        return isinstance(x, torch.Tensor) and x.device.type == self._gpus.kind

    def set_device(self, x: torch.Tensor) -> None:
        """Makes the GPU of x the current one of this thread. Called by a thread of ours."""
        self._gpus.set_device(x.device)

    def begin(self, x: torch.Tensor, needed: slice = ALL, *, reduces: bool = False) -> Moving:
        """Starts to copy x after the current stream's work. Called by the thread that starts the
        collective.

        needed: the rows that this rank contributes. Sums of 16-bit numbers are computed in host
        memory, because MPI has no such type.
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
    """A tensor in transit. The thread that calls MPI calls run(); the thread that waits passes its
    result to finish()."""

    def run(self, collective: Callable[[Any], Any]) -> Any: ...

    def finish(self, found: Any) -> torch.Tensor: ...


class Direct:
    """MPI gets the address of the tensor."""

    def __init__(self, gpus: Accelerator, x: torch.Tensor, stream: Stream) -> None:
        """stream: only used for memory allocated for the collective."""
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
        """Returns the tensor: MPI wrote the result before it returned."""
        self._gpus.keep(found, self._gpus.present(found.device))
        return found


class Staged:
    """MPI gets a copy in page-locked host memory, which the GPU copies on a separate stream."""

    def __init__(
        self, gpus: Accelerator, x: torch.Tensor, needed: slice, down: Stream, up: Stream
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
        """Runs the collective; returns the result, which is on the GPU after the event."""
        self._copied.synchronize()
        found = collective(self._host)
        with self._gpus.use(self._up):
            result = self._place(found)
            result.detach().copy_(found, non_blocking=True)
            self._gpus.keep(self._x, self._up)
            return result, self._up.record_event()

    def _place(self, found: torch.Tensor) -> torch.Tensor:
        """Returns the rows of x that correspond to `found` in the host's copy; new memory if it is
        not a part of the copy."""
        if found is self._host:
            return self._x
        if found.untyped_storage().data_ptr() != self._host.untyped_storage().data_ptr():
            return self._x.new_empty(found.shape)
        start = found.storage_offset()
        return self._x.detach().view(-1)[start : start + found.numel()].view(found.shape)

    def finish(self, found: tuple[torch.Tensor, Event]) -> torch.Tensor:
        """Makes the thread's current stream wait for the copy."""
        result, copied = found
        self._gpus.present(result.device).wait_event(copied)
        self._gpus.keep(result, self._gpus.present(result.device))
        return result

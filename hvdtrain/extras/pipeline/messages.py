"""Messages: tensors sent between stages of a pipeline. NCCL sends them from GPU to GPU. Other
engines send host memory; a GPU copies to and from page-locked memory while it computes the next
micro-batch."""

from __future__ import annotations

from typing import Any, cast

import torch

from hvdtrain.comm.communicator import Handle, PointToPoint
from hvdtrain.comm.staging import KINDS, Accelerator
from hvdtrain.extras.pipeline.times import DeviceTimes, HostTimes, Times


class Messages:
    """The tensors that one rank sends and receives, in any order. The host waits for a GPU only in
    flush(), for the copies of tensors that are sent."""

    def __init__(
        self, ranks: PointToPoint, device: torch.device, gpus: Accelerator | None = None
    ) -> None:
        """gpus: None: torch's GPU functions, if `device` is a GPU."""
        self._ranks = ranks
        self._device = device
        of_torch = (Accelerator(kind) for kind in KINDS if kind == device.type)
        self._gpus = gpus or next(of_torch, None)
        self._down: Any = self._gpus.new(device) if self._gpus else None
        self._waiting: list[Outgoing] = []  # until the GPU has copied them

    def start_send(self, tensor: torch.Tensor, to: int, name: str, tag: int) -> Handle:
        """Starts a send, on a GPU with the next flush(). The tensor must not change until the
        handle's wait() has returned."""
        if self._gpus is None:
            return self._ranks.start_send(on_host(tensor), to, name, tag)
        host = self._gpus.locked(tensor)
        filled = self._gpus.present(self._device).record_event()
        self._down.wait_event(filled)
        with self._gpus.use(self._down):
            host.copy_(tensor.detach(), non_blocking=True)
        self._gpus.keep(tensor, self._down)
        sent = Outgoing(self._ranks, host, to, name, tag, self._gpus.mark(self._down))
        self._waiting.append(sent)
        return sent

    def start_recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, name: str, tag: int
    ) -> Handle:
        """Starts a receive; its wait() returns a tensor on the device."""
        if self._gpus is None:
            return self._ranks.start_recv(torch.empty(shape, dtype=dtype), source, name, tag)
        host = self._gpus.locked(torch.empty(shape, dtype=dtype, device="meta"))
        return Incoming(self._ranks.start_recv(host, source, name, tag), self._device)

    def flush(self) -> None:
        """Completes the sends of start_send(). Called before this rank waits for another one, after
        the GPU was given more work, so that only the host waits."""
        waiting = self._waiting
        self._waiting = []
        for sent in waiting:
            sent.send()

    def times(self) -> Times:
        return HostTimes()


class DirectMessages:
    """The tensors that one rank sends and receives from GPU to GPU. The host waits for none; the
    current stream does, in wait(). From one rank they are received in the order in which it sends
    them."""

    def __init__(self, messages: Any, gpus: Accelerator, device: torch.device) -> None:
        """messages: DeviceMessages of comm/torch_groups.py."""
        self._messages = messages
        self._gpus = gpus
        self._device = device

    def start_send(self, tensor: torch.Tensor, to: int, name: str, tag: int) -> Handle:
        """Starts a send. The tensor must not change until the current stream has waited."""
        x = tensor.detach().contiguous()
        return OnDevice(self._messages.start_send(x, to), x)

    def start_recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, name: str, tag: int
    ) -> Handle:
        """Starts a receive; its wait() returns a tensor on the device."""
        x = torch.empty(shape, dtype=dtype, device=self._device)
        return OnDevice(self._messages.start_recv(x, source), x)

    def flush(self) -> None:
        """Does nothing: sends have begun."""

    def times(self) -> Times:
        return DeviceTimes(self._gpus, self._device)


AnyMessages = Messages | DirectMessages


def direct_messages(ranks: PointToPoint, device: torch.device) -> DirectMessages | None:
    """A collective. None if the engine does not send from GPU to GPU."""
    if device.type not in KINDS or "nccl" not in ranks.features:
        return None
    found = cast(Any, ranks).device_messages(device)
    return DirectMessages(found, Accelerator(device.type), device)


class OnDevice:
    """A tensor that NCCL sends or receives."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        """work: of torch.distributed; None for a tensor without elements."""
        self._work = work
        self._tensor = tensor

    def wait(self) -> Any:
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Outgoing:
    """A tensor that is sent once its copy is in host memory."""

    def __init__(
        self, ranks: PointToPoint, host: torch.Tensor, to: int, name: str, tag: int, copied: Any
    ) -> None:
        self._ranks = ranks
        self._host = host
        self._to = to
        self._name = name
        self._tag = tag
        self._copied = copied
        self._handle: Handle | None = None

    def send(self) -> None:
        self._copied.synchronize()
        self._handle = self._ranks.start_send(self._host, self._to, self._name, self._tag)

    def wait(self) -> Any:
        assert self._handle is not None, f"{self._name} is sent by flush()"
        return self._handle.wait()


class Incoming:
    """A tensor that is received in host memory and then copied to the device."""

    def __init__(self, handle: Handle, device: torch.device) -> None:
        self._handle = handle
        self._device = device

    def wait(self) -> Any:
        found: torch.Tensor = self._handle.wait()
        return found.to(self._device, non_blocking=True)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()

"""Messages: tensors sent between stages of a pipeline. Engines send host memory; a GPU copies to
and from page-locked memory while it computes the next micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.comm.communicator import Handle, PointToPoint
from hvdtrain.comm.staging import KINDS, Accelerator


class Messages:
    """The tensors that one rank sends and receives. The host waits for a GPU only in flush(), for
    the copies of tensors that are sent."""

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

"""The streams of a process set's collectives: they see what the caller's stream has computed, and that stream sees their results.

A stream is a queue of work for a GPU; what is in several of them runs side by side. The order between two streams is told to the GPU by
events, so the host waits for neither. What waits is only what follows in the stream that is told to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from hvdtrain.comm.staging import Cuda, Stream
from hvdtrain.horovod.engine.requests import Request


class Streams:
    """The streams of one process set: it has one for each GPU that has tensors of its requests, so that sets do not wait for each other."""

    def __init__(self, gpus: Cuda | None = None) -> None:
        self._gpus = gpus or Cuda()
        self._own: dict[torch.device, Stream] = {}

    def ask(self, request: Request) -> None:
        """By the thread that asks: the collective will follow what its present streams have been given until now."""
        if self._gpus.kind not in request.signature.devices:
            return
        request.asked = [self._gpus.present(device).record_event() for device in self._devices(request.inputs)]

    def behind(self, requests: Sequence[Request]) -> AbstractContextManager[Sequence[Stream]]:
        """By the thread that makes the collectives: inside, its present streams are those of the set, behind what the requests follow."""
        on_gpus = [request for request in requests if self._gpus.kind in request.signature.devices]
        return self._behind(on_gpus) if on_gpus else nullcontext(())

    @contextmanager
    def _behind(self, on_gpus: Sequence[Request]) -> Iterator[Sequence[Stream]]:
        devices = self._devices(tensor for request in on_gpus for tensor in request.inputs)
        streams = {device: self._stream(device) for device in devices}
        for request in on_gpus:
            for event in request.asked:
                streams[event.device].wait_event(event)
            for tensor in (*request.inputs, *request.outputs):
                if tensor.device in streams:
                    self._gpus.keep(tensor, streams[tensor.device])
        with ExitStack() as present:
            for stream in streams.values():
                present.enter_context(self._gpus.use(stream))
            yield list(streams.values())

    def receive(self, request: Request) -> None:
        """By the thread that has waited for the request: its present streams follow the results."""
        for event in request.made:
            self._gpus.present(event.device).wait_event(event)
        if request.made:
            for result in request.result:
                tensor = result[0] if isinstance(result, tuple) else result
                if tensor.device.type == self._gpus.kind:
                    self._gpus.keep(tensor, self._gpus.present(tensor.device))

    def _devices(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        """GPUs, each once."""
        return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == self._gpus.kind))

    def _stream(self, device: torch.device) -> Stream:
        if device not in self._own:
            self._own[device] = self._gpus.new(device)
        return self._own[device]

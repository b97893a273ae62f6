"""What torch has of GPUs, as the order between streams and copies to the host need it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

Stream = Any  # torch.cuda.Stream
Event = Any  # torch.cuda.Event


class Cuda:
    """Streams, which are queues of a GPU's work, and page-locked memory of the host, which a GPU copies to and from by itself."""

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
        """What the stream has been given until now, for a thread that waits for it: asleep, not in a loop."""
        return stream.record_event(torch.cuda.Event(blocking=True))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Its memory is not used again before the stream has done what it has been given until then."""
        tensor.record_stream(stream)

    def locked(self, like: torch.Tensor) -> torch.Tensor:
        """Page-locked memory for the numbers of a tensor, any numbers in it. torch keeps what is freed for the next one."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

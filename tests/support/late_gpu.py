"""A stand-in for a GPU, whose work is done as late as it may be: once something waits for it. Its
tensors are in host memory.

A copy or a collective that does not wait for what fills its tensor gets other numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from hvdtrain.comm.staging import Accelerator, Stream

HOST = torch.device("cpu")
COMM_THREAD = "hvdtrain-comm"


class LateStream:
    """A queue of work."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log
        self._work: list[Callable[[], object]] = []

    def give(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def record_event(self) -> LateEvent:
        return LateEvent(self, len(self._work))

    def wait_event(self, event: LateEvent) -> None:
        """What this stream gets from now on is done at once, so the other one's work is done
        now."""
        self._log.append(f"{self.name} waits for {event.stream.name}")
        event.synchronize()

    def synchronize(self) -> None:
        self.record_event().synchronize()


class LateEvent:
    """A place in the queue of a stream."""

    device = HOST

    def __init__(self, stream: LateStream, place: int) -> None:
        self.stream = stream
        self._place = place

    def synchronize(self) -> None:
        for index, work in enumerate(self.stream._work[: self._place]):
            self.stream._work[index] = lambda: None
            work()


class LateGpu(Accelerator):
    """Each thread has its own current stream. `log` records what each stream waits for and which
    tensors it keeps."""

    kind = "cpu"

    def __init__(self) -> None:
        self.log: list[str] = []
        self._of_thread = threading.local()
        self._made = 0

    def present(self, device: torch.device) -> Stream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = LateStream(
                f"stream of {threading.current_thread().name}", self.log
            )
        return self._of_thread.stream

    def set_device(self, device: torch.device) -> None:
        self._of_thread.device = device

    def new(self, device: torch.device) -> Stream:
        self._made += 1
        return LateStream(f"side stream {self._made}", self.log)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """A thread of ours has chosen its device before: a new one's is GPU 0."""
        name = threading.current_thread().name
        assert name != COMM_THREAD or hasattr(self._of_thread, "device"), f"{name} is on GPU 0"
        before = self.present(HOST)
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def mark(self, stream: Stream) -> LateEvent:
        return stream.record_event()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(f"{stream.name} keeps {tuple(tensor.shape)}")

    def locked(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full(like.shape, 77, device="cpu").to(like.dtype)  # any numbers

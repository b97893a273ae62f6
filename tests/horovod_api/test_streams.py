"""The order between a script's streams and its collectives, with streams that write down what they
are told; on a GPU: tests/gpu."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from pool import on_ranks
from ranks import needs_mpirun
from waiting import wait_until

from hvdtrain.comm.communicator import Buffer, SingleProcessCommunicator
from hvdtrain.comm.staging import Accelerator, Stream
from hvdtrain.horovod.engine.own import OwnEngine
from hvdtrain.horovod.engine.perform import Streams
from hvdtrain.horovod.engine.requests import GLOBAL, Request, Signature
from hvdtrain.horovod.engine.settings import Settings


class Event(NamedTuple):
    name: str
    device: torch.device


class Written:
    """A stream."""

    def __init__(self, name: str, gpus: Gpus) -> None:
        self.name = name
        self._gpus = gpus

    def record_event(self) -> Event:
        return Event(f"what {self.name} has until now ({len(self._gpus.log)})", torch.device("cpu"))

    def wait_event(self, event: Event) -> None:
        self._gpus.log.append(f"{self.name} waits for {event.name}")


class Gpus(Accelerator):
    """Of tensors in host memory, each thread has a present stream, as on a GPU."""

    kind = "cpu"

    def __init__(self) -> None:
        self.log: list[str] = []
        self._of_thread = threading.local()

    def present(self, device: torch.device) -> Stream:
        return getattr(self._of_thread, "stream", None) or Written("the default stream", self)

    def new(self, device: torch.device) -> Stream:
        return Written("the set's stream", self)

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"{threading.current_thread().name} chooses {device}")

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._of_thread, "stream", None)
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(f"{stream.name} keeps {int(tensor[0])}")


class Logged(SingleProcessCommunicator):
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self._gpus.log.append(f"{name} on {self._gpus.present(x.device).name}")
        return x


@pytest.mark.parametrize("makes", ["who waits", "a thread"])
def test_a_collective_follows_the_stream_that_asks_and_the_one_that_waits_follows_it(
    makes: str,
) -> None:
    """Asked for by a thread on one stream, made and waited for by another thread on another one.
    The engine's own thread chooses its GPU first: a new thread's is GPU 0, and leaving a stream of
    another one would open a context there."""
    gpus = Gpus()
    engine = OwnEngine(Logged(gpus), Settings())
    engine._is_asynchronous = makes == "a thread"
    lane = engine._lanes[GLOBAL]
    lane._streams = lane.rounds._streams = lane.rounds._performer._streams = Streams(gpus)
    # too long for the block of a round; enough for a thread
    length = 1 << 20 if makes == "a thread" else 1000
    request = Request(
        Signature(
            "weights",
            "broadcast",
            dtypes=("float32",),
            shapes=((length,),),
            root=0,
            devices=("cpu",),
        ),
        [torch.full((length,), 7.0)],
    )

    def wait() -> None:
        with gpus.use(Written("the stream that waits", gpus)):
            assert engine.wait(handle)[0].tolist() == [7.0] * length

    with gpus.use(Written("the stream that asks", gpus)):
        handle = engine.submit(GLOBAL, request)
    if makes == "a thread":
        wait_until(lambda: request.done, "the engine's thread has made it")
    other = threading.Thread(target=wait)
    other.start()
    other.join()
    chosen = ["hvdtrain-comm chooses cpu"] * (makes == "a thread")
    assert gpus.log == [
        *chosen,
        "the set's stream waits for what the stream that asks has until now (0)",
        "the set's stream keeps 7",
        "weights on the set's stream",
        f"the stream that waits waits for what the set's stream has until now ({3 + len(chosen)})",
        "the stream that waits keeps 7",
    ]


@needs_mpirun
@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_sums_are_those_of_one_reduce_scatter_and_of_one_for_each_uneven_tensor(
    size: int,
) -> None:
    """As on NCCL, by Gloo: tensors that split evenly go together; a row more is the first
    rank's."""
    for calls, failure in on_ranks("torchdist", size, "one_call_on_ranks:scattered"):
        assert not failure and calls == 3  # one of even tensors, two of uneven ones

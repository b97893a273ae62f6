"""The queue of a process set, which several threads use; compression of arrays."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hvdtrain.horovod as hvd
from hvdtrain.comm.exchange.alone import Alone
from hvdtrain.comm.threads import ThreadCommunicator, ThreadRanks
from hvdtrain.errors import LOST
from hvdtrain.horovod.engine.callers import Callers
from hvdtrain.horovod.engine.errors import Missing
from hvdtrain.horovod.engine.lane import Lane
from hvdtrain.horovod.engine.requests import Request, Signature
from hvdtrain.horovod.engine.settings import Settings
from hvdtrain.horovod.engine.timeline import Timeline


class Interrupted(Request):
    """While it is looked at, another thread queues a request."""

    __slots__ = ()
    bucket = property(lambda self: self.result(), lambda self, value: None)


def test_a_thread_looks_into_the_queue_while_another_one_fills_it() -> None:
    lane = Lane(ThreadCommunicator(ThreadRanks(1), 0), Alone(), [0], Settings(), Timeline(), Callers(), lambda _: None)  # type: ignore[arg-type]
    later = threading.Thread(target=lane.submit, args=(barrier(Request, "later"),))

    def interrupt() -> int:
        if not later.ident:
            later.start()
            later.join(0.2)
        return 0

    for name in ("first", "second"):
        request = barrier(Interrupted, name)
        request.result = interrupt
        lane.submit(request)
    assert not lane.has_shown()
    later.join()


def barrier(kind: type[Request], name: str) -> Request:
    return kind(Signature(name, "barrier"), list[torch.Tensor]())


def test_arrays_of_numpy_are_compressed() -> None:
    for kind in (hvd.Compression.fp16, hvd.Compression.bf16):
        wire, ctx = kind.compress(np.array([1.0, 2.5]))
        assert wire.dtype in (torch.float16, torch.bfloat16)
        found = kind.decompress(wire, ctx)
        assert isinstance(found, np.ndarray) and found.dtype == np.float64 and found.tolist() == [1.0, 2.5]
        whole = np.array([3])
        assert kind.decompress(*kind.compress(whole)) is whole


def test_idle_threads_ask_for_nothing() -> None:
    """The thread of a pool without work, and one that waits for a queue; but not one that works, nor one that waits for a time."""
    callers, place, work, ends = Callers(), object(), queue.Queue[int](), threading.Event()
    callers.wait(place)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(callers.ask).result()  # it has asked before, and has nothing to do now
        threads = [threading.Thread(target=work.get), threading.Thread(target=ends.wait)]
        for thread in threads:
            thread.start()
        until(lambda: callers.all_wait(place))
        for busy in (lambda: ends.wait(60), lambda: time.sleep(0.5)):
            begun = pool.submit(busy)
            assert not callers.all_wait(place)
            ends.set()
            begun.result()
            threads[1].join()
        until(lambda: callers.all_wait(place))
        work.put(1)
        threads[0].join()


def test_a_thread_that_has_asked_and_waits_for_a_queue_may_ask_again() -> None:
    callers, place, work = Callers(), object(), queue.Queue[int]()
    callers.wait(place)
    caller = threading.Thread(target=lambda: [callers.ask(), work.get()])  # type: ignore[func-returns-value]
    caller.start()
    time.sleep(0.05)
    assert not callers.all_wait(place)
    work.put(1)
    caller.join()
    assert callers.all_wait(place)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


class Breaking(Alone):
    """The connection breaks, as of Gloo where a rank is killed; some of three ranks are still there to say so."""

    def __init__(self, present: set[int] | None) -> None:
        self._present = present

    def done(self) -> bool:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:25009")

    def present(self) -> set[int]:
        if self._present is None:
            raise RuntimeError("the store is gone")
        return self._present


@pytest.mark.parametrize(
    ("present", "words"),
    [({0, 2}, "rank 7 is lost"), ({0}, "one of ranks 7, 9 is lost"), (None, "one of ranks 7, 9 is lost")],
    ids=["one", "two", "no store"],
)
def test_a_rank_that_is_lost_is_named_with_the_call_before_the_librarys_text(present: set[int] | None, words: str) -> None:
    """ranks: their numbers in the job."""
    communicator: Any = ThreadCommunicator(ThreadRanks(3), 0)
    lane = Lane(communicator, Breaking(present), [5, 7, 9], Settings(), Timeline(), Callers(), lambda _: None)
    request = barrier(Request, "last")
    lane.submit(request)
    lane.show()
    with pytest.raises(
        Missing, match=rf"^{words}: RuntimeError: \[gloo/.*\n  where: barrier 'last'\n  fix: look for the first error"
    ) as raised:
        lane.finish(request)
    assert raised.value.code == LOST and isinstance(raised.value.__cause__, RuntimeError)  # by which elastic.run() knows a loss
    assert request.error is raised.value


def test_a_daemon_that_gets_the_number_of_a_caller_is_no_caller() -> None:
    callers, place, ends = Callers(), object(), threading.Event()
    caller = threading.Thread(target=callers.ask)
    caller.start()
    caller.join()
    daemons = []
    while not daemons or (daemons[-1].ident != caller.ident and len(daemons) < 100):
        daemons.append(threading.Thread(target=ends.wait, daemon=True))
        daemons[-1].start()
    try:
        assert daemons[-1].ident == caller.ident, "no thread got the number of one that has ended"
        callers.wait(place)
        assert callers.all_wait(place)
    finally:
        ends.set()

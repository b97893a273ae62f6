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
from hvdtrain.comm.order import WORDS, Alone, Word
from hvdtrain.comm.threads import ThreadCommunicator, ThreadRanks
from hvdtrain.errors import LOST, STALLED
from hvdtrain.horovod.engine.errors import Missing, Stalled
from hvdtrain.horovod.engine.lane import Lane
from hvdtrain.horovod.engine.requests import Request, Signature
from hvdtrain.horovod.engine.settings import Settings
from hvdtrain.horovod.engine.timeline import Timeline
from hvdtrain.horovod.engine.waiting import Callers


class Interrupted(Request):
    """While it is looked at, another thread queues a request."""

    __slots__ = ()
    bucket = property(lambda self: self.result(), lambda self, value: None)


def test_a_thread_looks_into_the_queue_while_another_one_fills_it() -> None:
    lane = Lane(
        ThreadCommunicator(ThreadRanks(1), 0),
        Alone(),
        [0],
        Settings(),
        Timeline(),
        Callers(),
        lambda _: None,
    )  # type: ignore[arg-type]
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
        assert (
            isinstance(found, np.ndarray)
            and found.dtype == np.float64
            and found.tolist() == [1.0, 2.5]
        )
        whole = np.array([3])
        assert kind.decompress(*kind.compress(whole)) is whole


def test_idle_threads_ask_for_nothing() -> None:
    """The thread of a pool without work, and one that waits for a queue; but not one that works,
    nor one that waits for a time."""
    callers = Callers()
    place = object()
    work = queue.Queue[int]()
    ends = threading.Event()
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
    callers = Callers()
    place = object()
    work = queue.Queue[int]()
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
    """The connection breaks, as of Gloo where a rank is killed; some of three ranks are still there
    to say so."""

    def __init__(self, present: set[int] | None) -> None:
        self._present = present

    def done(self) -> bool:
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:25009"
        )

    def said(self) -> dict[Word, set[int]]:
        if self._present is None:
            raise RuntimeError("the store is gone")
        return super().said() | {"here": self._present}


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ({0, 2}, "rank 7 is lost"),
        ({0}, "one of ranks 7, 9 is lost"),
        (None, "one of ranks 7, 9 is lost"),
    ],
    ids=["one", "two", "no store"],
)
def test_a_rank_that_is_lost_is_named_with_the_call_before_the_librarys_text(
    present: set[int] | None, words: str
) -> None:
    """ranks: their numbers in the job."""
    communicator: Any = ThreadCommunicator(ThreadRanks(3), 0)
    lane = Lane(
        communicator,
        Breaking(present),
        [5, 7, 9],
        Settings(),
        Timeline(),
        Callers(),
        lambda _: None,
    )
    request = barrier(Request, "last")
    lane.submit(request)
    lane.show()
    with pytest.raises(
        Missing,
        match=rf"^{words}: RuntimeError: \[gloo/.*\n  where: barrier 'last'\n  fix: look for the "
        r"first error",
    ) as raised:
        lane.finish(request)
    # by which elastic.run() knows a loss
    assert raised.value.code == LOST and isinstance(raised.value.__cause__, RuntimeError)
    assert request.error is raised.value


GAVE_UP = "rank 0 gave up waiting before all ranks came"


class InThreads(Alone):
    """Of ranks in threads of this process."""

    def __init__(
        self,
        blocks: dict[int, dict[int, np.ndarray]],
        words: set[tuple[int, int, Word]],
        rank: int,
        size: int,
    ) -> None:
        """blocks: of each exchange, by rank; words: exchange, rank and what it said. All ranks have
        the same ones."""
        self._blocks = blocks
        self._words = words
        self._rank = rank
        self._size = size
        self._number = 0
        self.before_word: Callable[[Word], object] = lambda _: None

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number = self._number + 1
        self._rows = rows
        self._blocks.setdefault(self._number, {})[self._rank] = block.copy()

    def done(self) -> bool:
        came = self._blocks[self._number]
        if len(came) < self._size:
            return False
        for rank, block in list(came.items()):
            self._rows[rank] = block
        return True

    def say(self, word: Word) -> None:
        self.before_word(word)
        self._words.add((self._number, self._rank, word))

    def said(self) -> dict[Word, set[int]]:
        words = list(self._words)
        return {
            word: {rank for number, rank, other in words if (number, other) == (self._number, word)}
            for word in WORDS
        }


class LanesInThreads:
    """A lane for each rank, which never gives up; gives_up() changes rank 0's."""

    def __init__(self, size: int) -> None:
        communicators = ThreadRanks(size)
        blocks = dict[int, dict[int, np.ndarray]]()
        words = set[tuple[int, int, Word]]()
        self.exchanges = [InThreads(blocks, words, rank, size) for rank in range(size)]
        self.lanes = [
            Lane(
                ThreadCommunicator(communicators, rank),  # type: ignore[arg-type]
                exchange,
                range(size),
                Settings(end_s=None),
                Timeline(),
                Callers(),
                lambda _: None,
            )
            for rank, exchange in enumerate(self.exchanges)
        ]

    def gives_up(self, after_s: float | None) -> None:
        self.lanes[0]._settings = self.lanes[0].rounds._settings = Settings(end_s=after_s)

    def call(self, rank: int, name: str) -> str:
        """The first line of its error."""
        lane = self.lanes[rank]
        request = barrier(Request, name)
        try:
            lane.submit(request)
            lane.show()
            lane.finish(request)
        except Stalled as error:
            assert error.code == STALLED
            return str(error).splitlines()[0]
        return "done"

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.lanes)) as pool:
            return list(pool.map(work, range(len(self.lanes))))


def test_where_a_rank_gives_up_all_get_the_error_leave_and_may_come_back() -> None:
    """Rank 1 comes late, or makes no call at all; rank 2 would wait for ever."""
    ranks = LanesInThreads(3)
    gave_up = threading.Event()

    def late(rank: int, *, comes: bool) -> str:
        if rank == 1:
            assert gave_up.wait(60)
        error = ranks.call(rank, "late") if rank != 1 or comes else ""
        if rank == 0:
            gave_up.set()
        ranks.lanes[rank].leave()
        return error

    assert ranks.on_all(lambda rank: ranks.call(rank, "before")) == ["done"] * 3
    told = f"barrier 'late': {GAVE_UP}"
    waited = "barrier 'late': rank 1 did not come within 0.4 s"
    ranks.gives_up(0.4)
    assert ranks.on_all(lambda rank: late(rank, comes=True)) == [waited, told, told]
    ranks.gives_up(None)
    assert ranks.on_all(lambda rank: ranks.call(rank, "again")) == ["done"] * 3
    gave_up.clear()
    ranks.gives_up(0.4)
    assert ranks.on_all(lambda rank: late(rank, comes=False)) == [waited, "", told]
    ranks.gives_up(None)
    assert ranks.on_all(lambda rank: ranks.call(rank, "again")) == ["done"] * 3


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("here", ["done"] * 2),
        (
            "given up",
            [f"barrier 'late': {what}" for what in ("rank 1 did not come within 0.4 s", GAVE_UP)],
        ),
    ],
)
def test_a_rank_that_comes_as_another_one_gives_up_ends_as_that_one_does(
    word: Word, expected: list[str]
) -> None:
    """Rank 1 starts the exchange before rank 0 looks for it for the last time; or after that, and
    before rank 0 says that it gives up."""
    ranks = LanesInThreads(2)
    comes = threading.Event()
    came = threading.Event()
    start = ranks.exchanges[1].start

    def before_word(about_to_say: Word) -> None:
        if about_to_say == word:
            comes.set()
            assert came.wait(60)
            time.sleep(0.05)  # rank 1 finds that all have come

    def start_and_tell(block: np.ndarray, rows: np.ndarray) -> None:
        start(block, rows)
        came.set()

    def late(rank: int) -> str:
        assert rank == 0 or comes.wait(60)
        error = ranks.call(rank, "late")
        ranks.lanes[rank].leave()
        return error

    assert ranks.on_all(lambda rank: ranks.call(rank, "before")) == ["done"] * 2
    ranks.gives_up(0.4)
    ranks.exchanges[0].before_word = before_word
    ranks.exchanges[1].start = start_and_tell  # type: ignore[method-assign]
    assert ranks.on_all(late) == expected


def test_a_daemon_that_gets_the_number_of_a_caller_is_no_caller() -> None:
    callers = Callers()
    place = object()
    ends = threading.Event()
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

"""The order of collectives. A thread runs a rank's collectives in the order in which they were
started, and ranks compare the collectives that they will run, or have run."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Literal, NoReturn, Protocol, get_args

import numpy as np

from hvdtrain.comm.communicator import Buffer, Communicator
from hvdtrain.comm.mesh import ranks_summary
from hvdtrain.errors import UserError

ENDED = -1  # instead of a hash, for a rank that has run no more


class SameOrder:
    """Checks that all ranks run the same collectives. Ranks call ask() before each collective of a
    layer, and end() at the end of a pass or a step.

    A rank with different or fewer collectives then has a different question than the other ranks. A
    question is an allreduce of 16 bytes before the collective, because mismatched collectives of
    other sizes would fail or hang on an engine whose host waits. If the host does not wait (NCCL),
    ranks ask once, at the end of the step before its update. Each collective enters a hash, and the
    first difference is only searched for if the hashes differ.
    """

    def __init__(
        self,
        ranks: Communicator,
        rank: int,
        where: str,
        fix: str,
        *,
        lags: bool = False,
        what: str = "ranks use different layers",
    ) -> None:
        """rank: rank in the job; where, fix, what: for the error; lags: the host does not wait for
        the collectives."""
        self._ranks = ranks
        self._rank = rank
        self._where = where
        self._fix = fix
        self._what = what
        self.lags = lags
        self._history = History()
        self._waiting = ""  # waits for the answer to a question
        self.at = (
            ""  # activity of this rank between questions, for people: "forward pass of blocks.3"
        )

    @property
    def doing(self) -> str:
        """What this rank is doing, readable from any thread; empty between steps."""
        return self._waiting or self.at

    def ask(self, doing: str) -> None:
        """Raises UserError on every rank if another rank is not `doing` the same; where the host
        does not wait, in the next end()."""
        if self._ranks.size == 1:
            return
        if self.lags:
            self._history.add(doing)
            self.at = doing
            return
        self._waiting = doing
        if not self._is_same(_code(doing)):
            self._raise(doing)
        self._waiting = ""

    def end(self, doing: str, *, backward_follows: bool = False) -> None:
        """Like ask(), when no collective follows. If the host does not wait, it asks about all
        collectives since the last end(), unless backward_follows, because then the end of the step
        asks."""
        self.ask(doing)
        if self._history.hashes and not backward_follows:
            self._waiting = doing
            if not self._is_same(self._history.hashes[-1]):
                self._raise(self._first_difference())
            self._history = History()
            self._waiting = ""
        self.at = ""

    def _is_same(self, code: int) -> bool:
        """Whether every rank has this number."""
        largest = self._ranks.allreduce(np.array([code, -code]), "order", "max")
        return bool(largest[0] == -largest[1])

    def _first_difference(self) -> str:
        """Returns this rank's activity where the histories of ranks first differ, found by
        bisection, because a hash covers the whole history before it."""
        hashes = self._history.hashes
        last = self._ranks.allreduce(np.array([len(hashes) - 1]), "order", "max")
        # the ranks are the same before `first`, and differ at `last`
        differs = range(int(last[0]) + 1)
        first = bisect.bisect_left(
            differs, True, key=lambda i: not self._is_same(hashes[i] if i < len(hashes) else ENDED)
        )
        done = self._history.done
        return done[first] if first < len(done) else f"nothing after the {done[-1]}"

    def _raise(self, doing: str) -> NoReturn:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in self._ranks.allgather_object((self._rank, doing)):
            ranks_of.setdefault(theirs, []).append(rank)
        each = "; ".join(f"{ranks_summary(ranks)}: {theirs}" for theirs, ranks in ranks_of.items())
        raise UserError(f"{self._what} ({each})", self._where, self._fix)


class History:
    """The activities of a rank since ranks last compared them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.hashes: list[int] = []  # hash of all up to and including each

    def add(self, doing: str) -> None:
        before = self.hashes[-1] if self.hashes else 0
        self.done.append(doing)
        self.hashes.append(_code(f"{before} {doing}"))


def end_step(orders: Iterable[SameOrder]) -> None:
    for order in orders:
        order.end("end of the step")


def doing_in(orders: Iterable[SameOrder]) -> str:
    """Returns "forward pass of blocks.3"; empty between passes."""
    return ", ".join(order.doing for order in orders if order.doing)


def _code(doing: str) -> int:
    """Returns a hash, at least 0 and less than 2^56. Not cached, because torch.compile would warn
    about a cache."""
    return int.from_bytes(hashlib.blake2b(doing.encode(), digest_size=7).digest(), "little")


class CommThread:
    """Runs the collectives of one MPI communicator, which nothing else uses. A daemon thread that
    starts with the first collective."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Future | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, collective: Callable[[], Buffer]) -> Future:
        """Queues a call of `collective` behind all earlier ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdtrain-comm", daemon=True)
            self._thread.start()
        future = Future(collective)
        self._queue.put(future)
        return future

    def stop(self) -> None:
        """Waits until the thread has run everything that was started and has ended. Nothing may be
        started afterwards. Must not be called on that thread.

        The thread may hold the last reference to tensors: releasing them while the interpreter
        exits aborts the process.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (future := self._queue.get()) is not None:
            future.run()


class Future:
    """A Handle whose collective another thread runs."""

    def __init__(self, collective: Callable[[], Buffer]) -> None:
        self._collective = collective
        self._done = threading.Event()
        self._result: Buffer = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the collective; wait() raises its exception."""
        try:
            self._result = self._collective()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> Buffer:
        """Waits and returns the result. Raises the collective's error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


# a rank's state in an exchange: it waits, it has taken the result, or it never will
Word = Literal["here", "taken", "given up"]
WORDS: tuple[Word, ...] = get_args(Word)
# tags of MPI messages
NOTICE = 1
LAST = 2


class OrderedExchange(Protocol):
    """Consecutive gathers: each rank starts the next one when the last is done."""

    threads: bool  # whether threads of a process may use their communicators at the same time

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        """block: has the same length and dtype on every rank, and must not change until done();
        rows: receives the blocks in rank order."""

    def done(self) -> bool:
        """Whether every rank has started it. If a rank dies, raises like a collective."""

    def say(self, word: Word) -> None:
        """Sends a word about this rank's latest exchange to the other ranks, which need not be in
        it."""

    def said(self) -> dict[Word, set[int]]:
        """Returns the ranks that have sent each word about this exchange."""

    def free(self) -> None:
        """Every rank calls it once, last, when no exchange is pending. A collective."""


class Alone:
    """The exchange of one rank: nothing to wait for."""

    threads = True

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        rows[0] = block

    def done(self) -> bool:
        return True

    def say(self, word: Word) -> None:
        pass

    def said(self) -> dict[Word, set[int]]:
        return {word: set() for word in WORDS}

    def free(self) -> None:
        pass


class MpiExchange:
    """An exchange over an MPI communicator that nothing else uses: MPI_Iallgather, 2 microseconds
    on one host; words are sent as messages."""

    def __init__(self, mpi: Any, ranks: Any) -> None:
        self._mpi = mpi
        self._comm = ranks
        self._notices = ranks.Dup()
        self.threads = bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
        self._request = None
        self._number = 0
        self._sent: list[Any] = []  # requests of notices, with the memory that they use
        self._said: dict[
            tuple[int, Word], int
        ] = {}  # rank, word -> the last exchange that it sent it about

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number += 1
        self._request = self._comm.Iallgather(block, rows)

    def done(self) -> bool:
        assert self._request is not None, "nothing was started"
        return bool(self._request.Test())

    def say(self, word: Word) -> None:
        self._receive()
        self._sent = [(notice, request) for notice, request in self._sent if not request.Test()]
        notice = np.array([self._number, WORDS.index(word)])
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._sent += [(notice, self._notices.Isend(notice, rank, NOTICE)) for rank in others]
        self._said[self._comm.rank, word] = self._number

    def said(self) -> dict[Word, set[int]]:
        self._receive()
        now = [pair for pair, number in self._said.items() if number == self._number]
        return {word: {rank for rank, other in now if other == word} for word in WORDS}

    def _receive(self) -> None:
        """Receives messages of other ranks, which would otherwise wait in MPI's memory."""
        status = self._mpi.Status()
        notice = np.zeros(2, np.int64)
        while self._notices.Iprobe(self._mpi.ANY_SOURCE, NOTICE, status):
            self._notices.Recv(notice, status.source, NOTICE)
            self._said[status.source, WORDS[notice[1]]] = int(notice[0])

    def free(self) -> None:
        """Frees the communicator after its last message has arrived, because MPI may reuse its
        number."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        number = np.zeros(1, np.int64)
        sends = [self._notices.Isend(number, rank, LAST) for rank in others]
        for rank in others:
            self._notices.Recv(number, rank, LAST)  # after the notices of this rank
        self._receive()
        self._mpi.Request.Waitall([*sends, *(request for _, request in self._sent)])
        self._sent = []
        self._comm.Free()
        self._notices.Free()

    def revoke(self) -> None:
        """Makes every pending call of this exchange fail on every rank."""
        with contextlib.suppress(self._mpi.Exception):
            self._comm.Revoke()

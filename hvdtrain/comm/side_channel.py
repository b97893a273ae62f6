"""Side channels, over MPI or a store of torch.distributed: rank 0 gathers a message from each rank
while main threads hang, and all ranks exit together."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from hvdtrain.comm.signed import SignedStore
from hvdtrain.core.process import exit_now
from hvdtrain.errors import DONE, LOST

MPI_POLL_S = 0.02
# Tags on COMM_WORLD, or on the copy that survives a loss. Nothing else uses them, because Horovod
# and the mpi engine have separate communicators.
REQUEST = 29101
REPLY = 29102
ACKNOWLEDGMENT = 29103
STORE_POLL_S = 0.1
OWN_ERROR_S = (
    2.0  # time for this rank to report its error before it exits because the store has ended
)
HOST_EXITS_LATER_S = (
    0.5  # rank 0, whose process may host the store, exits after the others have read the exit code
)
_FOREVER = timedelta(days=365)


class Gather(NamedTuple):
    """One call of gather(); a later call ends it."""

    number: int
    end_s: float  # by time.monotonic()


class MpiSideChannel:
    """A side channel over MPI. Rank 0 sends requests and the others reply, in the threads that call
    gather(). Nothing is sent, posted or polled outside of gather().

    A rank may receive the request of a gather that rank 0 has abandoned. So each request has a
    number, rank 0 takes only replies to its latest one, and a rank replies to every request that it
    receives until one reply is acknowledged.
    """

    def __init__(self, mpi: Any, world: Any) -> None:
        """`mpi`: the module mpi4py.MPI; world: the MPI communicator of all ranks."""
        self._mpi = mpi
        self._world = world
        self._sends: list[
            Any
        ] = []  # pending requests of MPI, kept: MPI uses their memory; some never complete
        # tag -> (rank, pending request)
        self._receives: dict[int, list[tuple[int, Any]]] = {
            REQUEST: [],
            REPLY: [],
            ACKNOWLEDGMENT: [],
        }
        self._latest = 0  # number of the latest gather

    def gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers messages, see Communicator.side_channel_gather."""
        mpi = self._mpi
        if (
            not mpi.Is_initialized()
            or mpi.Is_finalized()
            or mpi.Query_thread() != mpi.THREAD_MULTIPLE
        ):
            return None
        gather = Gather(time.monotonic_ns(), time.monotonic() + wait_s)
        self._latest = gather.number
        return (
            self._collect(message, gather)
            if self._world.rank == 0
            else self._reply(message, gather)
        )

    def _collect(self, message: str, gather: Gather) -> list[str | None]:
        """Rank 0's part: returns the messages of all ranks, None for a rank whose reply did not
        arrive in time."""
        pending = set(range(1, self._world.size))
        messages: list[str | None] = [message, *[None] * len(pending)]
        for rank in sorted(pending):
            self._send(gather.number, rank, REQUEST)
        while pending and self._goes_on(gather):
            for rank, (number, reply) in self._received(REPLY):
                if number == gather.number:
                    messages[rank] = reply
                    pending.discard(rank)
                    self._send(number, rank, ACKNOWLEDGMENT)
        return messages

    def _reply(self, message: str, gather: Gather) -> list[str | None]:
        """The other ranks' part: replies, and returns when a reply is acknowledged or the time is
        over."""
        replied: set[int] = set()
        while self._goes_on(gather) and not replied & {
            number for _, number in self._received(ACKNOWLEDGMENT)
        }:
            for _, number in self._received(REQUEST):
                self._send((number, message), 0, REPLY)
                replied.add(number)
        return []

    def _goes_on(self, gather: Gather) -> bool:
        """Sleeps briefly. False when the time is over, a later gather has begun, or MPI is
        finalized."""
        time.sleep(MPI_POLL_S)
        if self._mpi.Is_finalized() or self._latest != gather.number:
            return False
        self._sends = [request for request in self._sends if not request.Test()]
        return time.monotonic() < gather.end_s

    def _send(self, content: Any, rank: int, tag: int) -> None:
        self._sends.append(self._world.isend(content, rank, tag))

    def _received(self, tag: int) -> Iterator[tuple[int, Any]]:
        """Yields (rank, content) of each message that has arrived completely. A large one stays
        pending if its sender has stopped meanwhile."""
        status = self._mpi.Status()
        receives = self._receives[tag]
        while message := self._world.improbe(tag=tag, status=status):
            receives.append((status.source, message.irecv()))
        for receive in receives[:]:
            rank, request = receive
            complete, content = request.test()
            if complete:
                receives.remove(receive)
                yield rank, content


class StoreSideChannel:
    """A side channel over a store, for ranks without MPI. Each use opens a separate connection,
    because waiting for a key blocks the connection for all other uses.

    Values that no rank of the job has signed count as absent; an unsigned end makes a rank exit
    with LOST, never with DONE.
    """

    def __init__(self, connect: Callable[[], SignedStore], rank: int, size: int) -> None:
        """`connect` opens a new connection to the store of this job."""
        self._connect = connect
        self._rank = rank
        self._size = size
        self._latest = 0  # number of the latest gather
        self._closed = False
        self.outlives_host = False  # the ranks continue if the process that hosts the store is gone
        self._thread = threading.Thread(
            target=self._exit_on_abort, args=(connect(),), name="abort", daemon=True
        )
        self._thread.start()

    def gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers messages, see Communicator.side_channel_gather; None if the process that hosts
        the store is gone."""
        number = time.monotonic_ns()
        end_s = time.monotonic() + wait_s
        self._latest = number

        def goes_on() -> bool:
            time.sleep(STORE_POLL_S)
            return self._latest == number and time.monotonic() < end_s

        try:
            store = self._connect()
            store.set_timeout(timedelta(seconds=max(1.0, wait_s)))
            if self._rank == 0:
                return self._collect(store, message, number, goes_on)
            return self._reply(store, message, goes_on)
        except RuntimeError:  # the connection to the store broke
            return None if self._rank == 0 else []

    def _collect(
        self, store: SignedStore, message: str, number: int, goes_on: Callable[[], bool]
    ) -> list[str | None]:
        """Rank 0's part: returns the messages of all ranks, None for a rank whose reply did not
        arrive in time."""
        messages: list[str | None] = [message, *[None] * (self._size - 1)]
        store.set("request", str(number))
        while None in messages and goes_on():
            for rank in [rank for rank, known in enumerate(messages) if known is None]:
                reply = (
                    store.get(f"reply/{number}/{rank}")
                    if store.has(f"reply/{number}/{rank}")
                    else None
                )
                if isinstance(reply, str):
                    messages[rank] = reply
                    store.set(f"acknowledgment/{number}/{rank}", "")
        return messages

    def _reply(
        self, store: SignedStore, message: str, goes_on: Callable[[], bool]
    ) -> list[str | None]:
        """The other ranks' part: replies until a reply is acknowledged. The store may still contain
        the request of a gather that rank 0 gave up."""
        replied: set[str] = set()
        while goes_on() and not any(
            store.has(f"acknowledgment/{number}/{self._rank}") for number in replied
        ):
            number = store.get("request") if store.has("request") else None
            if isinstance(number, str):
                store.set(f"reply/{number}/{self._rank}", message)
                replied.add(number)
        return []

    def abort(self, code: int) -> None:
        """Makes the other ranks exit with this code within a second; returns when the store has
        it."""
        with contextlib.suppress(RuntimeError):
            store = self._connect()
            store.set("abort", code)
            store.get("abort")  # set() returns before the store has the value
            time.sleep(STORE_POLL_S if self._rank else HOST_EXITS_LATER_S)

    def retire(self) -> None:
        """Called when another side channel replaces this one."""
        self._closed = True

    def close(self, wait_s: float) -> None:
        """Waits until every rank closes. Rank 0, whose process may host the store, leaves last.
        Every rank calls it."""
        self._closed = True
        end_s = time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):
            store = self._connect()
            store.add("closing", 1)
            if self._rank == 0:
                all_close = self._await_all(store, "closing", end_s)
                # wakes every rank's thread; a rank that is still open exits
                store.set("abort", DONE if all_close else LOST)
            self._thread.join(max(0.0, end_s - time.monotonic()))
            store.add("closed", 1)
            if self._rank == 0:
                self._await_all(store, "closed", end_s)

    def _await_all(self, store: SignedStore, counter: str, end_s: float) -> bool:
        """Whether every rank has added 1 to a counter in time."""
        while store.add(counter, 0) < self._size:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def _exit_on_abort(self, store: SignedStore) -> None:
        """In a thread: sleeps until a rank aborts, all ranks close or the connection breaks; exits
        the process unless it is closed.

        All ranks close before the store says DONE, so a rank that is still open when it reads DONE
        treats the job as failed.
        """
        what = "the connection to rank 0 broke"
        try:
            store.wait(["abort"], _FOREVER)
            code = store.get("abort")
            if type(code) is not int or not 0 < code < 256:
                what = (
                    "a process outside of the job wrote an end into the store, or rank 0 "
                    "closed too early"
                )
                code = LOST
        except RuntimeError:
            if self.outlives_host:
                return
            time.sleep(0.0 if self._closed else OWN_ERROR_S)
            code = LOST
        if self._closed:
            return
        if not self._rank:
            time.sleep(HOST_EXITS_LATER_S)
        if code == LOST and self._rank:
            with contextlib.suppress(OSError):
                print(f"hvdtrain: rank {self._rank}: {what}", file=sys.stderr, flush=True)
        exit_now(code)

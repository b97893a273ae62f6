"""Gathers one message of each rank on rank 0, and ends all ranks together, over the store of torch.distributed: for ranks without MPI.

Values that no rank of the job has signed count as absent; an end that no rank has signed ends a rank with LOST, never with DONE.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from hvdtrain.comm.signed.store import SignedStore
from hvdtrain.core.exit import exit_now
from hvdtrain.errors import DONE, LOST

POLL_S = 0.1
OWN_ERROR_S = 2.0  # time for this rank to report its own error before it exits because the store is gone
HOST_EXITS_LATER_S = 0.5  # rank 0, whose process may host the store, exits after the others have read the exit code
_FOREVER = timedelta(days=365)


class StoreSideChannel:
    """Each use opens a connection of its own: a connection that waits for a key is blocked for all other use."""

    def __init__(self, connect: Callable[[], SignedStore], rank: int, size: int) -> None:
        """`connect` opens a new connection to the store of this job."""
        self._connect, self._rank, self._size = connect, rank, size
        self._latest = 0  # number of the latest gather
        self._closed = False
        self.outlives_host = False  # the ranks go on where the process that hosts the store is gone
        self._thread = threading.Thread(target=self._exit_on_abort, args=(connect(),), name="abort", daemon=True)
        self._thread.start()

    def gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers messages, see Communicator.side_channel_gather; None where the process that hosts the store is gone."""
        number, end_s = time.monotonic_ns(), time.monotonic() + wait_s
        self._latest = number

        def goes_on() -> bool:
            time.sleep(POLL_S)
            return self._latest == number and time.monotonic() < end_s

        try:
            store = self._connect()
            store.set_timeout(timedelta(seconds=max(1.0, wait_s)))
            if self._rank == 0:
                return self._collect(store, message, number, goes_on)
            return self._reply(store, message, goes_on)
        except RuntimeError:  # the connection to the store broke
            return None if self._rank == 0 else []

    def _collect(self, store: SignedStore, message: str, number: int, goes_on: Callable[[], bool]) -> list[str | None]:
        """Rank 0's part: the messages of all ranks, None for those whose reply has not come in time."""
        messages: list[str | None] = [message, *[None] * (self._size - 1)]
        store.set("request", str(number))
        while None in messages and goes_on():
            for rank in [rank for rank, known in enumerate(messages) if known is None]:
                reply = store.get(f"reply/{number}/{rank}") if store.has(f"reply/{number}/{rank}") else None
                if isinstance(reply, str):
                    messages[rank] = reply
                    store.set(f"acknowledgment/{number}/{rank}", "")
        return messages

    def _reply(self, store: SignedStore, message: str, goes_on: Callable[[], bool]) -> list[str | None]:
        """The others' part, until a reply is acknowledged. The store may still have the request of a gather that rank 0 gave up."""
        replied: set[str] = set()
        while goes_on() and not any(store.has(f"acknowledgment/{number}/{self._rank}") for number in replied):
            number = store.get("request") if store.has("request") else None
            if isinstance(number, str):
                store.set(f"reply/{number}/{self._rank}", message)
                replied.add(number)
        return []

    def abort(self, code: int) -> None:
        """Has the other ranks exit with this code, within a second; returns once the store has it."""
        with contextlib.suppress(RuntimeError):
            store = self._connect()
            store.set("abort", code)
            store.get("abort")  # set() returns before the store has the value
            time.sleep(POLL_S if self._rank else HOST_EXITS_LATER_S)

    def retire(self) -> None:
        """The ranks have another side channel from now on."""
        self._closed = True

    def close(self, wait_s: float) -> None:
        """Waits until every rank closes: rank 0, whose process may host the store, leaves last. Every rank calls it."""
        self._closed, end_s = True, time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):
            store = self._connect()
            store.add("closing", 1)
            if self._rank == 0:
                all_close = self._await_all(store, "closing", end_s)
                store.set("abort", DONE if all_close else LOST)  # wakes every rank's thread; a rank that has not closed exits
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
        """In a thread: sleeps until a rank aborts, all ranks close or the connection breaks; exits the process unless it is closed.

        All ranks close before the store says DONE, so a rank that has not closed by then takes it for the end of a lost job.
        """
        what = "the connection to rank 0 broke"
        try:
            store.wait(["abort"], _FOREVER)
            code = store.get("abort")
            if type(code) is not int or not 0 < code < 256:
                what, code = "a process that is no rank of the job wrote its end into the store, or rank 0 closed too early", LOST
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

"""What ranks without MPI tell each other while their main threads hang in collectives: words on the store where they met."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hvdtrain.core.exit import exit_now
from hvdtrain.errors import DONE, LOST

POLL_S = 0.1
GRACE_S = 2.0  # for this rank's own words about what it lost
HEARD_S = 0.5  # rank 0, which may keep the store, leaves after the others have heard why
_FOREVER = timedelta(days=365)


class StoreSideChannel:
    """Each use has a connection of its own: one that waits keeps its connection to itself."""

    def __init__(self, connection: Callable[[], Any], rank: int, size: int) -> None:
        """`connection` opens one more torch.distributed.TCPStore, with this job's prefix."""
        self._connection, self._rank, self._size = connection, rank, size
        self._newest, self._closed = 0, False
        self._thread = threading.Thread(target=self._heed, args=(connection(),), name="abort", daemon=True)
        self._thread.start()

    def gather(self, text: str, wait_s: float) -> list[str | None] | None:
        """As Communicator.side_channel_gather."""
        number, end_s = time.monotonic_ns(), time.monotonic() + wait_s
        self._newest = number

        def goes_on() -> bool:
            time.sleep(POLL_S)
            return self._newest == number and time.monotonic() < end_s

        try:
            store = self._connection()
            store.set_timeout(timedelta(seconds=max(1.0, wait_s)))
            return self._ask(store, text, number, goes_on) if self._rank == 0 else self._answer(store, text, goes_on)
        except RuntimeError:  # of the store, which went with the process that keeps it
            return None if self._rank == 0 else []

    def _ask(self, store: Any, text: str, number: int, goes_on: Callable[[], bool]) -> list[str | None]:
        texts: list[str | None] = [text, *[None] * (self._size - 1)]
        store.set("question", str(number))
        while None in texts and goes_on():
            for rank in [rank for rank, known in enumerate(texts) if known is None]:
                if store.check([f"answer/{number}/{rank}"]):
                    texts[rank] = store.get(f"answer/{number}/{rank}").decode()
                    store.set(f"thanks/{number}/{rank}", "")
        return texts

    def _answer(self, store: Any, text: str, goes_on: Callable[[], bool]) -> list[str | None]:
        """Until it is thanked: a question of a stall that passed may still be there, and nobody takes an answer to that one."""
        answered: set[str] = set()
        while goes_on() and not any(store.check([f"thanks/{number}/{self._rank}"]) for number in answered):
            if store.check(["question"]):
                number = store.get("question").decode()
                store.set(f"answer/{number}/{self._rank}", text)
                answered.add(number)
        return []

    def abort(self, code: int) -> None:
        """The others end with this code, within a moment."""
        with contextlib.suppress(RuntimeError):
            store = self._connection()
            store.set("abort", str(code))
            store.get("abort")  # set() does not wait for the store to have it
            time.sleep(POLL_S if self._rank else HEARD_S)

    def close(self, wait_s: float) -> None:
        """Every rank calls it. Nobody leaves with a thread that waits on the store, and rank 0, which may keep it, leaves last."""
        self._closed, end_s = True, time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):
            store = self._connection()
            store.add("closing", 1)
            if self._rank == 0:
                all_close = self._await(store, "closing", end_s)
                store.set("abort", str(DONE if all_close else LOST))  # wakes every rank's thread; one that does not close ends
            self._thread.join(max(0.0, end_s - time.monotonic()))
            store.add("closed", 1)
            if self._rank == 0:
                self._await(store, "closed", end_s)

    def _await(self, store: Any, count: str, end_s: float) -> bool:
        """Whether every rank has added one to this count in time."""
        while store.add(count, 0) < self._size:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def _heed(self, store: Any) -> None:
        """In a thread, asleep until somebody aborts, all ranks close, or the store is gone with the rank that kept it."""
        try:
            store.wait(["abort"], _FOREVER)
            code = int(store.get("abort"))
        except RuntimeError:
            time.sleep(0.0 if self._closed else GRACE_S)
            code = LOST
        if self._closed:
            return
        if not self._rank:
            time.sleep(HEARD_S)
        if code == LOST and self._rank:
            with contextlib.suppress(OSError):
                print(f"hvdtrain: rank {self._rank}: the connection to rank 0 broke", file=sys.stderr, flush=True)
        exit_now(code)

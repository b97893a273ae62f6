"""Which threads of this process call Horovod's API, and whether one of them can still ask for something."""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple
from weakref import WeakSet

POLLING_S = 5.0  # of poll() after poll() of a thread, until it is taken for one that waits
_PAUSE_S = 1.0  # a longer one between two of them is work of its own


_POOL_WORKER = concurrent.futures.thread._worker.__code__  # innermost only while the thread waits for work
_WAIT = threading.Condition.wait.__code__  # of a queue's get(), of an event, of a semaphore


class Polling(NamedTuple):
    """The polling of a thread that has asked for nothing meanwhile."""

    place: object
    first_s: float
    last_s: float


class Callers:
    """Threads that call one engine. A waiting thread waits in one place: a process set's lane."""

    def __init__(self) -> None:
        self._known = WeakSet[threading.Thread]()  # that have asked for something; a thread's number may become that of another one
        self._waiting: dict[int, object] = {}  # thread -> where it waits
        self._polling: dict[int, Polling] = {}

    def ask(self) -> None:
        """Notes that the thread that calls it asks for something."""
        self._known.add(threading.current_thread())
        self._polling.pop(threading.get_ident(), None)

    def poll(self, place: object) -> None:
        """Notes that what the calling thread polls is not there yet."""
        now, thread = time.monotonic(), threading.get_ident()
        known = self._polling.get(thread)
        goes_on = known is not None and known.place is place and now - known.last_s < _PAUSE_S
        self._polling[thread] = Polling(place, known.first_s if known is not None and goes_on else now, now)

    def wait(self, place: object) -> None:
        self._waiting[threading.get_ident()] = place

    def go_on(self) -> None:
        self._waiting.pop(threading.get_ident(), None)

    def all_wait(self, place: object) -> bool:
        """Whether every thread that may ask for something waits at `place`, or has done nothing but poll there for POLLING_S.

        One may that has asked before, or that is no daemon: those of libraries are, and call nothing here. Threads that Python has not
        started are those of autograd, which ask within a backward() that another thread waits for. The idle thread of a pool may not,
        and one that has never asked may not while it waits without a limit for what other threads put or set.
        """
        frames = sys._current_frames()
        return all(
            self._waiting.get(ident) is place or self._only_polls(ident, place) or self._is_idle(thread, frames.get(ident))
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread) and (not thread.daemon or thread in self._known)
            for ident in [thread.ident or 0]
        )

    def _is_idle(self, thread: threading.Thread, frame: FrameType | None) -> bool:
        """frame: where the thread is."""
        if frame is None or thread.ident in self._waiting:
            return False
        found = frame.f_locals
        if frame.f_code is _POOL_WORKER:
            return bool(found["work_queue"].empty())
        if frame.f_code is not _WAIT or thread in self._known or thread is threading.main_thread():
            return False
        return found["timeout"] is None and found.get("waiter") in found["self"]._waiters  # which lacks it once it is woken

    def _only_polls(self, thread: int, place: object) -> bool:
        found = self._polling.get(thread)
        if found is None or found.place is not place or thread in self._waiting:
            return False
        return found.last_s - found.first_s > POLLING_S and time.monotonic() - found.last_s < _PAUSE_S

"""Which threads of this process call Horovod's API, and whether one of them can still ask for something."""

from __future__ import annotations

import threading


class Callers:
    """Of one engine. A waiting thread waits in one place: a process set's lane."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # threads that have asked for something
        self._waiting: dict[int, object] = {}  # thread -> where it waits

    def ask(self) -> None:
        """Of the thread that calls it."""
        self._known.add(threading.get_ident())

    def wait(self, place: object) -> None:
        self._waiting[threading.get_ident()] = place

    def go_on(self) -> None:
        self._waiting.pop(threading.get_ident(), None)

    def all_wait(self, place: object) -> bool:
        """Whether every thread that may ask for something waits at `place`.

        One may that has asked before, or that is no daemon: those of libraries are, and call nothing here. Threads that Python has not
        started are those of autograd, which ask within a backward() that another thread waits for.
        """
        return all(
            self._waiting.get(thread.ident or 0) is place
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread) and (not thread.daemon or thread.ident in self._known)
        )

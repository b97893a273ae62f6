"""One process set as the threads of a rank use it: which thread makes rounds, and how long it waits
for a request."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import CommThread, OrderedExchange
from hvdtrain.horovod.engine.agree import ranks_text
from hvdtrain.horovod.engine.errors import HorovodInternalError, Missing, Stalled
from hvdtrain.horovod.engine.perform import Streams
from hvdtrain.horovod.engine.request_queue import RequestQueue
from hvdtrain.horovod.engine.requests import Request, Signature
from hvdtrain.horovod.engine.rounds import FIX_NAMES, Rounds
from hvdtrain.horovod.engine.settings import Settings
from hvdtrain.horovod.engine.timeline import Timeline
from hvdtrain.horovod.engine.waiting import Callers

IDLE_S = 0.005  # between two rounds without progress
# how often a thread checks whether the thread that runs the rounds has completed its request
LOOK_S = 0.001


class Lane:
    """The requests of one process set that this process belongs to.

    Other ranks see a request when this rank waits for any of its requests, or when enough are
    queued. So the collectives of a round depend only on the ranks' programs, not on time.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: OrderedExchange,
        ranks: Sequence[int],
        settings: Settings,
        timeline: Timeline,
        callers: Callers,
        change: Callable[[Signature], Any],
        streams: Streams | None = None,
    ) -> None:
        """ranks: the communicator's ranks, as numbered in the job. callers: threads of this
        process. streams: only for this set.

        change: adds or removes a process set that all ranks have agreed on.
        """
        self._settings = settings
        self._callers = callers
        self.communicator = communicator
        self._streams = streams or Streams()
        self._queue = RequestQueue(settings.fusion_bytes, timeline)
        self.rounds = Rounds(
            communicator,
            exchange,
            ranks,
            settings,
            timeline,
            self._queue,
            self._streams,
            change,
            lambda: callers.all_wait(self),
        )
        self._turn = threading.Lock()  # held by the thread that runs rounds
        self._starting = threading.Lock()  # lock of start()
        self._thread: CommThread | None = None
        self._is_queued = False  # start() was called, but its rounds are still queued
        self._wanted = False  # another thread wants rounds until there are no requests
        self.has_left = False  # set when every rank has left

    def submit(self, request: Request) -> bool:
        """Queues a request; True if enough are queued. Raises BadCall if one of this name is under
        way."""
        if self.rounds.broken is not None:
            raise self.rounds.broken
        self._streams.ask(request)
        return self._queue.add(request)

    def show(self) -> None:
        """Makes the requests so far visible to other ranks from the next round on."""
        self._queue.show()

    def has_shown(self) -> bool:
        return self._queue.has_shown()

    def finish(self, request: Request) -> None:
        """Waits until a request is done, by rounds of this thread or of another one. Raises Stalled
        if it is not done in time."""
        start = time.monotonic()
        self._callers.wait(self)
        try:
            while not request.done:
                if self._turn.acquire(timeout=LOOK_S):
                    try:
                        if not request.done:
                            self.rounds.make()
                    finally:
                        self._turn.release()
                    self._pause()
                self._check_patience(request, start)
        finally:
            self._callers.go_on()

    def result(self, request: Request) -> Any:
        """Returns the result of a completed request. On a GPU, it is available to later work in the
        current streams of this thread."""
        self._streams.receive(request)
        return request.result

    def step(self, request: Request) -> bool:
        """Whether a request is done; runs what is possible without waiting for absent ranks. Raises
        Stalled like finish()."""
        if not request.done and self._turn.acquire(blocking=False):
            if request.polled_s is None:
                request.polled_s = time.monotonic()
            try:
                self.rounds.begin()
                if self.rounds.others_have_come() or self._has_waited(request.polled_s):
                    self.rounds.end()
            finally:
                self._turn.release()
            self._pause()
            self._check_patience(request, request.polled_s)
        return request.done

    def start(self) -> None:
        """Starts rounds on a thread of this set. They continue while want() is True and something
        is requested."""
        with self._starting:
            if self._is_queued:
                return
            self._is_queued = True
            if self._thread is None:
                self._thread = CommThread()
        self._thread.start(self._work)

    def want(self, wanted: bool) -> None:
        self._wanted = wanted

    def join(self) -> int:
        """Takes part in all requests of the others until all have joined; returns the rank that
        joined last."""
        self.show()
        attendance = self.rounds.attendance
        with self._turn:
            attendance.join()
            try:
                while not attendance.all_joined:
                    self.rounds.make()
                    self._pause()
                    if attendance.ended_meanwhile:
                        raise Missing(
                            f"{ranks_text(attendance.ended_meanwhile)} ended without it",
                            "hvd.join()",
                            FIX_NAMES,
                        )
            finally:
                attendance.end_join()
                self.rounds.note_progress(progress=True)
        return attendance.last_joined

    def leave(self) -> None:
        """Runs requests until every rank leaves; ranks may return, even after a round in which one
        gave up.

        It waits without a limit for a rank that is still working.
        """
        self._wanted = False  # so that the thread of this set leaves the rounds to this one
        self.show()
        attendance = self.rounds.attendance
        with self._turn:
            attendance.leave()
            while not attendance.all_leaving:
                if isinstance(self.rounds.broken, Stalled):
                    self.rounds.come_together()
                with contextlib.suppress(Stalled):  # another rank gave up waiting for this one
                    self.rounds.make()
                self._pause()
            attendance.end_leave()
            self.rounds.note_progress(progress=True)
        self.has_left = True

    def close(self) -> None:
        """Ends its thread. Called after leave(): no request follows."""
        removed = HorovodInternalError("this process set was removed")
        self.rounds.broken = self.rounds.broken or removed
        if self._thread is not None:
            self._thread.stop()

    def _work(self) -> None:
        self._streams.set_device()
        with self._turn:
            self._is_queued = False
            while self.has_shown() and self.rounds.broken is None:
                self.rounds.make()
                if not self._wanted:
                    return
                self._pause()

    def _check_patience(self, request: Request, start: float) -> None:
        if request.done or not self._has_waited(start):
            return
        missing = self.rounds.missing.get(request.key, [])
        what = f"ranks {missing} did not ask for it within {self._settings.end_s:g} s"
        raise Stalled(what, request.signature.where, FIX_NAMES)

    def _has_waited(self, start: float) -> bool:
        """Whether a rank has waited since `start`, a time of time.monotonic(), as long as the limit
        for waiting."""
        return self._settings.end_s is not None and time.monotonic() - start > self._settings.end_s

    def _pause(self) -> None:
        """Pauses after a round without progress. Called without the lock of the rounds, for which
        another thread may be waiting."""
        if self.rounds.is_idle:
            time.sleep(IDLE_S)

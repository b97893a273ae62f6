"""Waits for the other ranks of a set. Reports missing ranks, and gives up after a time limit. Also
detects whether all threads of a rank wait.

Ranks agree on whether an exchange counts. A rank that waits for a long time publishes "here", and
how its wait ends: "taken" or "given up". A rank that arrives late looks for these words, and takes
the result only if no rank gives up.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple
from weakref import WeakSet

from hvdtrain.comm.order import OrderedExchange
from hvdtrain.horovod.engine.agree import ranks_text
from hvdtrain.horovod.engine.errors import Stalled
from hvdtrain.horovod.engine.settings import Settings

SPIN_S = 0.0002  # without sleeping, because the others are about to arrive
# each sleep is one in this many of the time waited so far: a rank that polls all the time slows
# down its neighbour on the same core
SHARE = 8
SLEEP_S = 0.0005  # at most
ANNOUNCE_S = 0.5  # waiting time until it is announced to the others
WORD_S = 0.002  # interval of checks for how the waits of the others end
LOOK_S = 0.1  # after that, interval of checks whether another rank gives up
NOTICE_S = 1.0  # time for the "here" of other ranks to arrive
END_S = 10.0  # time for the other ranks to publish how their wait ends; a killed rank never does
_FIX = (
    "look at what these ranks do instead (py-spy dump); or "
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=... (0: wait forever)"
)
_FIX_LATE = (
    "look at which rank came late, in the message of the one that gave up; or "
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=... (0: wait forever)"
)
POLLING_S = 5.0  # how long a thread must only poll until it counts as waiting
_PAUSE_S = 1.0  # a longer pause between two polls counts as other work
# libraries that run a compiled function, and the functions that it calls, on separate threads
_COMPILERS = (
    "tensorflow",
    "jax",
    "jaxlib",
)
# innermost only while the thread waits for work
_POOL_WORKER = concurrent.futures.thread._worker.__code__
_WAIT = threading.Condition.wait.__code__  # used by a queue's get(), an event, a semaphore


class ExchangeWait(NamedTuple):
    """A rank's wait in an exchange: the exchange, its ranks, and its purpose."""

    exchange: OrderedExchange
    settings: Settings
    ranks: Sequence[int]  # the set's, numbered in the job
    rank: int  # this one's place among them
    purpose: Callable[[], str]


def wait_for(waiting: ExchangeWait, since: float) -> None:
    """Waits until every rank is in the exchange and takes it. Raises Stalled on all of them if one
    gives up, after settings.end_s.

    since: time.monotonic() when this rank started the previous exchange; the others may have waited
    since then.
    """
    exchange = waiting.exchange
    wait_without_word(waiting, lambda: _raise_if_given_up(waiting))
    if time.monotonic() - since < ANNOUNCE_S:  # as in nearly every round, nothing was announced
        return
    if waiting.rank in exchange.said()["here"]:
        exchange.say("taken")
    end = time.monotonic() + END_S
    while _raise_if_given_up(waiting) and time.monotonic() < end:
        time.sleep(WORD_S)


def wait_without_word(waiting: ExchangeWait, look: Callable[[], object] = lambda: None) -> None:
    """Waits until every rank is in the exchange, without telling the other ranks that this rank has
    received it. Raises the errors of look(), and Stalled."""
    exchange = waiting.exchange
    settings = waiting.settings
    start = time.perf_counter()
    looked_s = 0.0
    warned = False
    while not exchange.done():
        waited_s = time.perf_counter() - start
        if waited_s < SPIN_S:
            continue
        time.sleep(min(SLEEP_S, waited_s / SHARE))
        if waited_s > looked_s + (LOOK_S if looked_s else ANNOUNCE_S):
            if not looked_s:
                exchange.say("here")
            looked_s = waited_s
            look()
        if settings.warn_s is not None and waited_s > settings.warn_s and not warned:
            warned = True
            _warn(waiting, waited_s)
        if settings.end_s is not None and waited_s > settings.end_s:
            _give_up(waiting)


def _give_up(waiting: ExchangeWait) -> None:
    """Gives up and raises Stalled; returns if the missing ranks arrive meanwhile."""
    missing = _missing(waiting.exchange, waiting.ranks)
    if waiting.exchange.done():
        return
    waiting.exchange.say("given up")
    what = (
        f"{waiting.purpose()}: {ranks_text(missing)} did not come within "
        f"{waiting.settings.end_s:g} s"
    )
    raise Stalled(what, "hvdtrain.horovod", _FIX)


def _raise_if_given_up(waiting: ExchangeWait) -> bool:
    """Whether some ranks are still waiting."""
    said = waiting.exchange.said()
    if said["given up"]:
        gone = ranks_text([waiting.ranks[place] for place in sorted(said["given up"])])
        what = f"{waiting.purpose()}: {gone} gave up waiting before all ranks came"
        raise Stalled(what, "hvdtrain.horovod", _FIX_LATE)
    return bool(said["here"] - said["taken"])


def _warn(waiting: ExchangeWait, waited_s: float) -> None:
    """Prints a warning, on the first rank that waits."""
    missing = _missing(waiting.exchange, waiting.ranks)
    present = [other for other in waiting.ranks if other not in missing]
    if missing and present and waiting.ranks[waiting.rank] == present[0]:
        text = (
            f"hvdtrain.horovod: {waiting.purpose()}: {ranks_text(present)} waited {waited_s:.0f} "
            f"s for {ranks_text(missing)}"
        )
        print(text, file=sys.stderr, flush=True)


def _missing(exchange: OrderedExchange, ranks: Sequence[int]) -> list[int]:
    exchange.say("here")
    end = time.monotonic() + NOTICE_S
    while time.monotonic() < end and not exchange.done():
        time.sleep(0.02)
    present = exchange.said()["here"]
    return [rank for place, rank in enumerate(ranks) if place not in present]


def lost_ranks(exchange: OrderedExchange, ranks: Sequence[int], rank: int) -> list[int]:
    """Returns the ranks that do not announce themselves after a connection broke; may include ranks
    that are still busy."""
    others = {place for place in range(len(ranks)) if place != rank}
    absent = set(others)
    end = time.monotonic() + NOTICE_S
    with contextlib.suppress(
        Exception
    ):  # the store of torch.distributed ends with the rank that hosts it
        exchange.say("here")
        while len(absent) > 1 and time.monotonic() < end:
            absent = others - exchange.said()["here"]
            time.sleep(0.02)
    return [ranks[place] for place in sorted(absent or others)]


class Polling(NamedTuple):
    """The polling of a thread that has made no requests meanwhile."""

    place: object
    first_s: float
    last_s: float


class Stay(NamedTuple):
    """The position of a thread in its program, where it was observed repeatedly."""

    place: tuple[int, int]  # frame, instruction
    first_s: float


class Callers:
    """Threads that call one engine. A waiting thread waits in one place: a process set's lane."""

    def __init__(self) -> None:
        self._stays: dict[int, Stay] = {}
        self._known = WeakSet[
            threading.Thread
        ]()  # threads that have made a request; thread numbers may be reused
        self._waiting: dict[int, object] = {}  # thread -> its waiting place
        self._polling: dict[int, Polling] = {}

    def ask(self) -> None:
        """Records that the calling thread makes a request."""
        self._known.add(threading.current_thread())
        self._polling.pop(threading.get_ident(), None)

    def poll(self, place: object) -> None:
        """Records that the calling thread polled an unfinished request."""
        now = time.monotonic()
        thread = threading.get_ident()
        known = self._polling.get(thread)
        goes_on = known is not None and known.place is place and now - known.last_s < _PAUSE_S
        self._polling[thread] = Polling(
            place, known.first_s if known is not None and goes_on else now, now
        )

    def wait(self, place: object) -> None:
        self._waiting[threading.get_ident()] = place

    def go_on(self) -> None:
        self._waiting.pop(threading.get_ident(), None)

    def all_wait(self, place: object) -> bool:
        """Whether every thread that may make requests waits at `place`, or has only polled there
        for POLLING_S.

        A thread may make requests if it has made one before, or if it is not a daemon, because
        libraries' threads are daemons and make no calls here. Threads that Python did not start
        belong to autograd, within a backward() that another thread waits for, or run a function
        that TensorFlow or JAX compiled. If one of them waits, so does the thread that called the
        function. Exceptions are idle threads of a pool, and threads that have never made a request
        while they wait without a limit for other threads.
        """
        frames = sys._current_frames()
        return all(
            self._waiting.get(ident) is place
            or self._only_polls(ident, place)
            or self._is_idle(thread, frames.get(ident))
            or self._is_within_compiled(ident, frames.get(ident))
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread)
            and (not thread.daemon or thread in self._known)
            for ident in [thread.ident or 0]
        )

    def _is_idle(self, thread: threading.Thread, frame: FrameType | None) -> bool:
        """Whether a thread is idle. frame: its current frame."""
        if frame is None or thread.ident in self._waiting:
            return False
        found = frame.f_locals
        if frame.f_code is _POOL_WORKER:
            return bool(found["work_queue"].empty())
        if frame.f_code is not _WAIT or thread in self._known or thread is threading.main_thread():
            return False
        # it is removed when the thread is woken
        return found["timeout"] is None and found.get("waiter") in found["self"]._waiters

    def _is_within_compiled(self, thread: int, frame: FrameType | None) -> bool:
        """Whether it stays in one place of a library that compiles, while a thread that Python has
        not started waits for ranks."""
        started = {
            each.ident
            for each in threading.enumerate()
            if not isinstance(each, threading._DummyThread)
        }
        library = (
            str(frame.f_globals.get("__name__")).partition(".")[0] if frame is not None else ""
        )
        if (
            frame is None
            or library not in _COMPILERS
            or thread in self._waiting
            or started.issuperset(self._waiting)
        ):
            self._stays.pop(thread, None)
            return False
        now = time.monotonic()
        place = (id(frame), frame.f_lasti)
        known = self._stays.get(thread)
        if known is None or known.place != place:
            self._stays[thread] = Stay(place, now)
            return False
        return now - known.first_s > _PAUSE_S

    def _only_polls(self, thread: int, place: object) -> bool:
        found = self._polling.get(thread)
        if found is None or found.place is not place or thread in self._waiting:
            return False
        return (
            found.last_s - found.first_s > POLLING_S and time.monotonic() - found.last_s < _PAUSE_S
        )

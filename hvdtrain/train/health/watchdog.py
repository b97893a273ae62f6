"""The watch: a thread that notices a stall, and a signal during the start, says what it saw, and ends the job."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn, TypeVar

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import GuardConfig
from hvdtrain.core.exit import exit_now
from hvdtrain.errors import REQUEUE, STALLED
from hvdtrain.train.health.heartbeat import Heartbeat
from hvdtrain.train.health.signals import Signals, write_stderr
from hvdtrain.train.health.stall_report import Report, frames_of_work, is_waiting, pack, render, render_alone, stack_of, unpack

T = TypeVar("T")

TICK_S = 0.5
GLANCE_S = 0.05  # between two looks of a rank that waits for other ranks' reports
FIRST_S = 2.0  # rank 0 speaks, and ends the job, that much before the others do
END_S = 5  # for the last words and the end of all ranks
PASSED_ON_S = 0.2  # mpirun passes output on in pieces of 4 KB; its own words about the abort would come between them


class Limit(NamedTuple):
    name: str
    seconds: float


class Watchdog:
    """A context manager around all that the entering thread does, from the start to the last checkpoint; leave it before MPI ends.

    A rank whose interpreter is held by C code cannot look at itself; the other ranks tell of it.
    """

    def __init__(self, heartbeat: Heartbeat, signals: Signals, guard: GuardConfig, rank: int) -> None:
        self._heartbeat, self._signals, self._guard, self._rank = heartbeat, signals, guard, rank
        self._tick_s = min([TICK_S, *(limit_s / 10 for limit_s in (guard.stall_s, guard.start_s) if limit_s is not None)])
        self._host, self._hosts = socket.gethostname(), list[str]()
        self._communicator: Communicator | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._signals.wake()
        self._thread.join()

    def attach(self, communicator: Communicator) -> None:
        """From now on one report tells of all ranks. Every rank calls it, once."""
        self._hosts = communicator.allgather_object(self._host)
        self._communicator = communicator

    def _watch(self) -> None:
        idle = Idle(2 * self._tick_s)
        while not self._over.is_set():
            self._signals.poll(self._tick_s)
            idle.look(self._heartbeat.beats, time.monotonic())
            limit = self._limit()
            if self._signals.received and not self._heartbeat.training:
                self._stop_the_start()
            elif limit and idle.seconds > limit.seconds:
                self._stall(limit, idle.seconds)

    def _limit(self) -> Limit | None:
        key = self._heartbeat.limit
        limit_s = self._guard.start_s if key == "start_s" else self._guard.stall_s
        return None if limit_s is None else Limit(f"guard.{key}", limit_s)

    def _stop_the_start(self) -> None:
        self._wait(FIRST_S * bool(self._rank), lambda: self._heartbeat.training)
        if not self._heartbeat.training and not self._over.is_set():
            what = f"{self._signals.received} during the start ({self._heartbeat.phase}): nothing to save; the same command starts again"
            self._end(f"hvdtrain: rank {self._rank} on {self._host}: {what}", REQUEUE)

    def _stall(self, limit: Limit, idle_s: float) -> None:
        """Tells of it and ends the job, unless the main thread goes on meanwhile."""
        beats = self._heartbeat.beats

        def goes_on() -> bool:
            return self._heartbeat.beats != beats or self._over.is_set()

        blank = self._report(idle_s, sources=False)
        report = self._try(lambda: self._report(idle_s, sources=True), FIRST_S, goes_on) or blank  # sources may be on a disk that hangs
        text = self._text(report, limit, goes_on)
        if not goes_on():
            self._end(text, STALLED)

    def _text(self, report: Report, limit: Limit, goes_on: Callable[[], bool]) -> str:
        """Rank 0 asks all ranks; the others answer, and wait for it to end the job. On a rank that cannot, its own words."""
        communicator, wait_s = self._communicator, min(10.0, max(3.0, limit.seconds / 30))
        wait_s += 2 * bool(self._rank)
        everyone = self._try(lambda: communicator.side_channel_gather(pack(report), wait_s) if communicator else None, wait_s + 1, goes_on)
        if everyone:
            return render([unpack(text) if text else None for text in everyone], self._hosts, limit.seconds, limit.name)
        if everyone is None:  # those that are behind speak before those that wait for them
            self._wait(FIRST_S * bool(self._rank) + 1.5 * FIRST_S * report.waiting, goes_on)
            return render_alone(report, limit.seconds, limit.name)
        self._wait(wait_s + 0.2 * min(self._rank, 25), goes_on)  # not all speak at once
        return render_alone(report, limit.seconds, limit.name, f", and rank 0 on {self._hosts[0]} does not answer")

    def _report(self, idle_s: float, *, sources: bool) -> Report:
        p, frames = self._heartbeat, frames_of_work(self._watched)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - idle_s))
        place = (self._rank, self._host, os.getpid(), p.phase, p.epoch, p.step)
        return Report(*place, idle_s, since, is_waiting(frames), stack_of(frames, sources=sources))

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        waited = Idle(2 * self._tick_s)
        waited.look(0, time.monotonic())
        while waited.seconds < seconds and not over():
            self._signals.poll(GLANCE_S)
            waited.look(0, time.monotonic())

    def _try(self, function: Callable[[], T], limit_s: float, over: Callable[[], bool]) -> T | None:
        """What the function returns, or None where it hangs or fails too."""
        results: list[T] = []
        thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
        thread.start()
        self._wait(limit_s, lambda: not thread.is_alive() or over())
        return results[0] if results else None

    def _end(self, text: str, code: int) -> NoReturn:
        """Whatever hangs: a write to a pipe that nobody reads, the lock of stdout, MPI."""
        last = threading.Timer(END_S, os._exit, [code])
        last.daemon = True
        last.start()
        signal.alarm(2 * END_S)  # mpi4py holds the interpreter in MPI_Abort, so where that hangs no thread can end this process
        write_stderr(text)
        if self._communicator is not None and self._communicator.size > 1:
            time.sleep(PASSED_ON_S)
            self._communicator.abort(code)
        exit_now(code)


class Idle:
    """Seconds without a beat, of which one look adds `most_s` at most.

    A job that was suspended, a machine that slept, a clock that was set are no stall.
    """

    def __init__(self, most_s: float) -> None:
        self.seconds = 0.0
        self._most_s, self._beats, self._looked_s = most_s, -1, 0.0

    def look(self, beats: int, now_s: float) -> None:
        """now_s is of time.monotonic()."""
        self.seconds = self.seconds + min(now_s - self._looked_s, self._most_s) if beats == self._beats else 0.0
        self._beats, self._looked_s = beats, now_s

"""The watchdog: a thread that ends the job after a stall, with a report of all ranks, or after a
signal during the start."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn, TypeVar

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.sections.guard import GuardConfig
from hvdtrain.core.process import exit_now, print_stderr, write_stderr
from hvdtrain.errors import REQUEUE, STALLED
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.stall_report import (
    StallReport,
    calls_of,
    frames_of_work,
    is_waiting,
    pack,
    render,
    render_alone,
    unpack,
)

T = TypeVar("T")

CHECK_S = 0.5  # between two checks of the heartbeat
POLL_S = 0.05  # between two checks whether other ranks' reports are there
RANK_0_FIRST_S = 2.0  # rank 0 prints and ends the job this long before the others do
AT_END_S = 1.0  # time to release the lock of the run folder
END_S = 5  # time for the report and the end of all ranks
# mpirun forwards output in pieces of 4 KB; its message about the abort would come between them
FLUSH_S = 0.2


class StallLimit(NamedTuple):
    key: str  # "guard.stall_s"
    seconds: float


class Watchdog:
    """A context manager around everything the entering thread does, from the start to the last
    checkpoint; exit it before MPI is finalized.

    If C code holds the interpreter lock of a rank, its watchdog cannot run; the other ranks'
    watchdogs report that rank.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        signals: Signals,
        guard: GuardConfig,
        rank: int,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._at_end = at_end
        self._heartbeat = heartbeat
        self._signals = signals
        self._guard = guard
        self._rank = rank
        limits_s = [limit_s for limit_s in (guard.stall_s, guard.start_s) if limit_s is not None]
        self._check_s = min([CHECK_S, *(limit_s / 10 for limit_s in limits_s)])
        self._host = socket.gethostname()
        self._hosts: list[str] = []  # of each rank
        self.places: list[str] = []  # place of each rank in the mesh, when it is known
        self._communicator: Communicator | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._watched_thread = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._signals.wake()
        self._thread.join()

    def attach(self, communicator: Communicator) -> None:
        """Makes one report cover all ranks, with their current numbers. Every rank calls it."""
        self._rank = communicator.rank
        self._hosts = communicator.allgather_object(self._host)
        self._communicator = communicator

    def _run(self) -> None:
        idle = IdleTime(2 * self._check_s)
        answered = False
        while not self._over.is_set():
            self._signals.poll(self._check_s)
            idle.update(self._heartbeat.beats, time.monotonic())
            limit = self._limit()
            if self._signals.received and not self._heartbeat.training:
                self._stop_during_start()
            elif self._signals.received == "SIGINT" and not self._rank and not answered:
                # Ctrl-C: a person waits
                print_stderr("hvdtrain: stopping at the next sync point; again to kill")
                answered = True
            elif limit and idle.seconds > limit.seconds:
                self._stop_after_stall(limit, idle.seconds)

    def _limit(self) -> StallLimit | None:
        key = self._heartbeat.limit
        limit_s = self._guard.start_s if key == "start_s" else self._guard.stall_s
        return None if limit_s is None else StallLimit(f"guard.{key}", limit_s)

    def _stop_during_start(self) -> None:
        if self._rank:
            self._wait(RANK_0_FIRST_S, lambda: self._heartbeat.training)
        if not self._heartbeat.training and not self._over.is_set():
            what = (
                f"{self._signals.received} during the start ({self._heartbeat.phase}): nothing to "
                "save; the same command starts again"
            )
            self._end(f"hvdtrain: rank {self._rank} on {self._host}: {what}", REQUEUE)

    def _stop_after_stall(self, limit: StallLimit, idle_s: float) -> None:
        """Reports the stall and ends the job; does nothing if the main thread progresses
        meanwhile."""
        beats = self._heartbeat.beats

        def goes_on() -> bool:
            return self._heartbeat.beats != beats or self._over.is_set()

        try:
            without_sources = self._report(idle_s, sources=False)
            # sources may be on a disk that hangs
            report = self._try(lambda: self._report(idle_s, sources=True), RANK_0_FIRST_S, goes_on)
            message = self._message(report or without_sources, limit, goes_on)
        except Exception:
            # a bug in hvdtrain, which would end this thread, so that the job could hang forever
            what = (
                f"no progress for {limit.seconds:g} s ({limit.key}); the job ends with exit code "
                f"{STALLED}; the report of it failed:"
            )
            message = (
                f"hvdtrain: rank {self._rank} on {self._host}: {what}\n{traceback.format_exc()}"
            )
        if not goes_on():
            self._end(message, STALLED)

    def _message(self, report: StallReport, limit: StallLimit, goes_on: Callable[[], bool]) -> str:
        """On rank 0, the report of all ranks. The other ranks send their reports, and wait for rank
        0 to end the job.

        Returns a report of only this rank if that is not possible, or if rank 0 does not end the
        job in time.
        """
        communicator = self._communicator
        wait_s = min(10.0, max(3.0, limit.seconds / 30)) + (2 if self._rank else 0)
        reports: list[str | None] | None = None
        if communicator:
            reports = self._try(
                lambda: communicator.side_channel_gather(pack(report), wait_s), wait_s + 1, goes_on
            )
        if reports:
            return render(
                [unpack(packed) if packed else None for packed in reports],
                self._hosts,
                limit.seconds,
                limit.key,
                self.places,
            )
        if (
            reports is None
            # without a side channel, ranks that are behind print before ranks that wait for them
        ):
            self._wait(
                (RANK_0_FIRST_S if self._rank else 0.0)
                + (1.5 * RANK_0_FIRST_S if report.waiting else 0.0),
                goes_on,
            )
            return render_alone(report, limit.seconds, limit.key)
        self._wait(wait_s + 0.2 * min(self._rank, 25), goes_on)  # one rank after the other
        return render_alone(
            report, limit.seconds, limit.key, f", and rank 0 on {self._hosts[0]} does not answer"
        )

    def _report(self, idle_s: float, *, sources: bool) -> StallReport:
        frames = frames_of_work(self._watched_thread)
        under_way = self._heartbeat.under_way()
        return StallReport(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            phase=self._heartbeat.phase,
            epoch=self._heartbeat.epoch,
            step=self._heartbeat.step,
            idle_s=idle_s,
            since=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - idle_s)),
            waiting=is_waiting(frames),
            stack=calls_of(frames, sources=sources),
            place=self._heartbeat.place,
            doing=under_way.text if under_way else "",
            waits_for=under_way.waits_for if under_way else None,
        )

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        waited = IdleTime(2 * self._check_s)
        waited.update(0, time.monotonic())
        while waited.seconds < seconds and not until():
            self._signals.poll(POLL_S)
            waited.update(0, time.monotonic())

    def _try(
        self, function: Callable[[], T], limit_s: float, until: Callable[[], bool]
    ) -> T | None:
        """Returns the function's result; None if it fails or hangs for limit_s."""
        results: list[T] = []
        thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
        thread.start()
        self._wait(limit_s, lambda: not thread.is_alive() or until())
        return results[0] if results else None

    def _end(self, message: str, code: int) -> NoReturn:
        """Prints the message and ends all ranks, even if a write to a full pipe, the lock of
        standard output or MPI hangs."""
        last_resort = threading.Timer(END_S, os._exit, [code])
        last_resort.daemon = True
        last_resort.start()
        signal.alarm(
            2 * END_S
            # mpi4py holds the interpreter lock in MPI_Abort: if that hangs, no thread can end this
            # process
        )
        write_stderr(message)
        self._try(self._at_end, AT_END_S, lambda: False)  # on a disk that may hang
        if self._communicator is not None and self._communicator.size > 1:
            time.sleep(FLUSH_S)
            self._communicator.abort(code)
        exit_now(code)


class IdleTime:
    """Seconds without a beat; one update adds at most `most_s`.

    A suspended job, a sleeping machine or a changed clock is not a stall.
    """

    def __init__(self, most_s: float) -> None:
        self.seconds = 0.0
        self._most_s = most_s
        self._beats = -1
        self._updated_s = 0.0

    def update(self, beats: int, now_s: float) -> None:
        """Updates the idle time. now_s: from time.monotonic()."""
        self.seconds = (
            self.seconds + min(now_s - self._updated_s, self._most_s)
            if beats == self._beats
            else 0.0
        )
        self._beats = beats
        self._updated_s = now_s

"""Starts ranks, sees how they end, and starts them again on the hosts that are there: one
supervisor for one job."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.core.early_signals import STOPPING, EarlySignals
from hvdtrain.core.folder import Folder
from hvdtrain.core.process import print_stderr
from hvdtrain.errors import DONE, LOST, REQUEUE, UserError
from hvdtrain.events.background_sink import CLOSE_S
from hvdtrain.extras.launch.hosts import (
    Ended,
    Failure,
    HostBook,
    Offer,
    Probes,
    at_step,
    choose,
    decide,
    reason_to_change,
    reason_to_give_up,
    slots_of,
)
from hvdtrain.extras.launch.mpirun import Host
from hvdtrain.extras.launch.run import LauncherRun

LOOK_S = 0.2  # interval of checks of the job and the hosts
LEFT_OUT = 3  # checks of the offered hosts for which a host is excluded after its first failure
# Time for a launcher to end after the job's last event, in addition to its sinks: mpirun with ULFM
# may hang if a rank dies meanwhile.
OVER_S = 30.0 + CLOSE_S
SETTLED = 2  # checks of the offered hosts while a job trains, before its hosts are changed


class Limits(NamedTuple):
    """The limits that the user sets."""

    least: int  # ranks
    most: int | None  # ranks; None: all slots
    patience_s: float  # below `least`
    every_s: float  # interval of checks of the offered hosts
    answer_s: float  # after which a host that does not answer counts as lost


class Supervisor:
    """Starts a job again and again. run: the job's folder, or None for a script without one, whose
    exit code counts. launcher: composes the command line for hosts with their ranks.

    probe: composes the command line that runs PROGRAM of hosts.py on a host.
    """

    def __init__(
        self,
        run: Path | None,
        offer: Offer,
        limits: Limits,
        launcher: Callable[[Sequence[Host]], LauncherRun],
        probe: Callable[[str], Sequence[str]],
    ) -> None:
        self._offer = offer
        self._limits = limits
        self._launcher = launcher
        self._record = Record(run)
        self._job = JobEvents(run)
        self._probes = Probes(probe, limits.answer_s)
        self._book = HostBook(LEFT_OUT * limits.every_s)
        self._failures: list[Failure] = []
        self._starts = 0
        self._signals = EarlySignals()  # signals between two starts
        self._looked_s = -float("inf")
        self._offer_error = self._probe_error = ""

    def run(self) -> int:
        """Returns the exit code: the job's, or 84 if fewer hosts than it needs are left. Raises
        UserError from the first offer."""
        former = {number: signal.getsignal(number) for number in STOPPING}
        for number, handler in former.items():
            if isinstance(handler, EarlySignals):
                self._signals.received = self._signals.received or handler.received
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._signals)
        try:
            # an offer that cannot be read at first is a mistake
            self._book.offer(self._offer.read())
            while True:
                hosts = self._wait_for_hosts()
                if self._signals.received:
                    return REQUEUE
                if not hosts:
                    return LOST
                code = self._start(hosts)
                if code is not None:
                    return code
        finally:
            self._probes.close()
            self._record.write()
            for number, handler in former.items():
                signal.signal(number, handler)

    def _wait_for_hosts(self) -> tuple[Host, ...]:
        """Returns the hosts to start on; none if the time limit is over, or after a signal.

        The time limit begins after the first check, which may take long, has found too few.
        """
        since_s: float | None = None
        while not self._signals.received:
            self._look_at_hosts()
            hosts = choose(self._book.usable(), self._limits.most)
            if not self._probes.are_open:
                if slots_of(hosts) >= self._limits.least:
                    return hosts
                if since_s is not None and time.monotonic() - since_s > self._limits.patience_s:
                    text = (
                        f"{slots_of(hosts)} slots for {self._limits.patience_s:g} s, at least "
                        f"{self._limits.least} are needed: given up"
                    )
                    self._record.add(
                        "given_up",
                        f"{text}, exit code {LOST}; the same command resumes the job",
                        code=LOST,
                    )
                    return ()
                if since_s is None:
                    since_s = time.monotonic()
                    short = f"{slots_of(hosts)} slots, at least {self._limits.least} are needed"
                    self._record.add(
                        "waits",
                        f"{short}: waits for up to {self._limits.patience_s:g} s",
                        slots=slots_of(hosts),
                    )
            time.sleep(LOOK_S)
        return ()

    def _look_at_hosts(self) -> None:
        """Reads the offer again when it is due, probes hosts, and collects the results."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._limits.every_s:
            self._looked_s = now_s
            self._read_offer()
        unknown = self._book.unknown(now_s)
        if self._offer.is_local:
            for name in unknown:
                self._book.answered(name)
            return
        self._probes.ask(unknown)
        for name, answers in self._probes.poll().items():
            if answers:
                self._book.answered(name)
            else:
                pause_s = self._book.failed(name, now_s)
                self._record.add(
                    "host_lost",
                    f"{name} does not answer: left out for {pause_s:g} s",
                    host=name,
                    left_out_s=pause_s,
                )
        if self._probes.error != self._probe_error:
            self._probe_error = self._probes.error
            if self._probe_error:
                self._record.add(
                    "warning", f"no host can be asked whether it answers: {self._probe_error}"
                )

    def _read_offer(self) -> None:
        """Reads the offer. If it cannot be read, that is reported once, and the last offer is
        kept."""
        try:
            self._book.offer(self._offer.read())
            self._offer_error = ""
        except UserError as error:
            if error.what != self._offer_error:
                self._record.add(
                    "warning", f"the hosts are those of before: {error.what} ({error.where})"
                )
            self._offer_error = error.what

    def _start(self, hosts: tuple[Host, ...]) -> int | None:
        """Runs one start of the ranks until it ends; returns the exit code if the job is not
        restarted."""
        self._starts += 1
        self._job.begin()
        began_s = time.monotonic()
        launcher = self._launcher(hosts)
        start = _Start(hosts, launcher)
        ranks = slots_of(hosts)
        self._record.add(
            "start",
            f"start {self._starts}: {ranks} ranks on {hosts_text(hosts)}",
            ranks=ranks,
            hosts=hosts_field(hosts),
        )
        code = launcher.run(lambda: self._watch(start), LOOK_S)
        self._job.poll()
        self._book.worked((host.name for host in hosts), time.monotonic() - began_s)
        if start.is_cut_off:
            code = {"end": DONE, "stop": REQUEUE, "failed": self._job.exit_code}.get(
                self._job.ending, code
            )
        ended = Ended(code, self._job.ending, self._job.step, launcher.stopped, start.asked)
        return self._after(start, ended)

    def _watch(self, start: _Start) -> None:
        """Checks, while the job runs, whether it should move to other hosts."""
        self._job.poll()
        self._record.write()
        self._look_at_hosts()
        now_s = time.monotonic()
        if self._job.trains and start.trains_since_s is None:
            start.trains_since_s = now_s
            self._record.add(
                "trains",
                f"step {self._job.step} on {self._job.ranks} ranks",
                step=self._job.step,
                ranks=self._job.ranks,
            )
        self._see_losses(start, now_s)
        if self._is_over_for_long(start, now_s):
            return
        if (
            start.asked
            or start.trains_since_s is None
            or now_s - start.trains_since_s < SETTLED * self._limits.every_s
        ):
            return
        chosen = choose(self._book.usable(), self._limits.most)
        why = reason_to_change(
            start.hosts, start.ranks, self._book.offered, chosen, self._limits.least
        )
        if why:
            start.asked = True
            self._record.add(
                "change",
                f"{why}: the job stops at its next sync point, and resumes there",
                step=self._job.step,
            )
            start.launcher.ask_to_stop()

    def _is_over_for_long(self, start: _Start, now_s: float) -> bool:
        """Kills a launcher that still runs OVER_S after the job reported its end, which is kept."""
        is_over = bool(self._job.ending) and self._job.step >= 0
        start.over_since_s = (start.over_since_s or now_s) if is_over else None
        if start.over_since_s is None or now_s - start.over_since_s < OVER_S:
            return False
        if not start.is_cut_off:
            start.is_cut_off = True
            text = (
                f"the job ended ({self._job.ending}), but its launcher did not exit within "
                f"{OVER_S:g} s and is killed"
            )
            self._record.add("warning", text, step=self._job.step)
        start.launcher.kill()
        return True

    def _see_losses(self, start: _Start, now_s: float) -> None:
        """Called after the job has continued without some of its ranks (guard.lost=shrink); probes
        their hosts again."""
        before = start.ranks
        start.ranks = self._job.ranks or start.ranks
        if start.ranks < before:
            fields = {"step": self._job.step, "ranks": start.ranks, "lost": before - start.ranks}
            self._record.add(
                "shrunk",
                f"{before - start.ranks} of {before} ranks lost, {start.ranks} left",
                **fields,
            )
            if start.trains_since_s is not None:
                start.trains_since_s = now_s
            self._book.doubt(host.name for host in start.hosts)

    def _after(self, start: _Start, ended: Ended) -> int | None:
        decision = decide(ended)
        if decision.action == "finish":
            self._record.add(
                "end",
                f"the job ended with {decision.code}, {at_step(ended.step)}",
                step=ended.step,
                code=decision.code,
            )
            return decision.code
        return None if decision.action == "change" else self._after_failure(start, ended)

    def _after_failure(self, start: _Start, ended: Ended) -> int | None:
        was = f"the launcher ended with {ended.code}, {at_step(ended.step)}"
        lost = self._lost(start.hosts)
        if lost:
            self._record.add(
                "lost",
                f"{was}: {', '.join(lost)} lost",
                step=ended.step,
                code=ended.code,
                hosts=lost,
            )
            return None
        if self._signals.received or ended.is_of_a_job_that_was_over:
            return REQUEUE if self._signals.received else DONE
        self._failures.append(Failure(ended.code, ended.step))
        why = reason_to_give_up(self._failures, self._starts == 1)
        if why:
            code = ended.code or LOST
            self._record.add(
                "given_up", f"{was}: not started again, {why}", step=ended.step, code=code
            )
            return code
        self._record.add(
            "failed",
            f"{was}: its hosts answer, so it is started again",
            step=ended.step,
            code=ended.code,
        )
        return None

    def _lost(self, hosts: Sequence[Host]) -> list[str]:
        """Returns the hosts of a failed start that no longer answer or are no longer offered."""
        if self._offer.is_local:
            return []
        names = [host.name for host in hosts]
        self._book.doubt(names)
        self._look_at_hosts()
        while self._probes.are_open and not self._signals.received:
            self._look_at_hosts()
            time.sleep(LOOK_S / 4)
        answering = {host.name for host in self._book.usable()}
        return [name for name in names if name not in answering]


class _Start:
    """The state of one start of the job."""

    def __init__(self, hosts: tuple[Host, ...], launcher: LauncherRun) -> None:
        self.hosts = hosts
        self.launcher = launcher
        self.ranks = slots_of(hosts)  # remaining ranks
        self.asked = False  # to stop
        self.trains_since_s: float | None = None
        self.over_since_s: float | None = None  # the job's last word
        self.is_cut_off = False  # whether its launcher, which had not ended, was killed


EVENTS = "events.jsonl"
_READ_BYTES = 2**22  # at a time
_EVENT = b'{"time":'  # the beginning of every event
_ENDINGS = ("end", "stop", "failed")


class JobEvents:
    """The events of the job that writes to the run folder. begin() discards events of earlier
    starts.

    run=None: a script without a run folder, which looks like a job that was already complete, so
    its exit code decides.
    """

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._offset = 0
        self._rest = b""
        # see Ended.ending; from the previous start until this start has an event
        self.ending = "" if run else "end"
        self._forget()

    def begin(self) -> None:
        """Called before a start of the ranks; the file's current content belongs to earlier
        starts."""
        self.poll()
        self._forget()

    def poll(self) -> None:
        """Reads new events. A missing or unreadable folder has no events."""
        if self._run is None:
            return
        try:
            with Folder.open(self._run) as folder, folder.open_file(EVENTS) as file:
                file.seek(self._offset)
                while data := file.read(_READ_BYTES):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    for line in lines:
                        self._take(line)
        except OSError:
            return

    def _forget(self) -> None:
        self.exit_code = 1  # exit code from an ending
        self.step = -1  # step of its last sync point; -1 before it has started
        self.ranks = 0  # its number of ranks
        self.trains = False  # whether it has reached a sync point

    def _take(self, line: bytes) -> None:
        event = _parse(line)
        kind = event.get("kind")
        step = event.get("step")
        if kind not in ("start", "step", "lost", *_ENDINGS) or not isinstance(step, int):
            return
        self.ending = kind if kind in _ENDINGS else ""
        self.step = step if kind == "start" else max(self.step, step)
        code = event.get("exit_code")
        self.exit_code = code if isinstance(code, int) else 1
        self.trains = kind == "step" or (self.trains and kind != "start")
        ranks = event.get({"start": "ranks", "lost": "left"}.get(kind, ""))
        self.ranks = ranks if isinstance(ranks, int) else self.ranks


def _parse(line: bytes) -> dict[str, Any]:
    """Returns the last event in a line; a killed job may have left half a line before it."""
    try:
        event = json.loads(line[max(0, line.rfind(_EVENT)) :])
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


FILE = "launch.jsonl"


class Record:
    """Lines for the run folder, which the job creates; they wait until its first event exists.
    Without a folder (None) they are printed on the standard error."""

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._waiting = list[bytes]()

    def add(self, kind: str, text: str, **fields: Any) -> None:
        print_stderr(f"hvdtrain launch: {text}")
        event = {"time": round(time.time(), 3), "kind": kind, **fields, "text": text}
        self._waiting.append(json.dumps(event).encode() + b"\n")
        self.write()

    def write(self) -> None:
        """Writes waiting lines. A full disk loses these lines, but does not stop the job."""
        if self._run is None:
            self._waiting.clear()
            return
        with suppress(OSError), Folder.open(self._run) as folder:
            if folder.status(EVENTS) is None:
                return
            with folder.append(FILE) as file:
                while self._waiting:
                    file.write(self._waiting[0])
                    del self._waiting[0]


def hosts_text(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{host.name} x {host.slots}" for host in hosts)


def hosts_field(hosts: Sequence[Host]) -> dict[str, int]:
    return {host.name: host.slots for host in hosts}

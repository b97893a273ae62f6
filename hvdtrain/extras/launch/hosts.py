"""The hosts of an elastic job: which are offered, respond, or are temporarily excluded, and when a
job restarts on them. All are pure functions."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.errors import DONE, LOST, REQUEUE, USER, UserError, short
from hvdtrain.extras.launch.allocation import read_hostfile
from hvdtrain.extras.launch.mpirun import Host, ranks_per_host

SCRIPT_S = 10.0  # time limit of the program
_LARGEST_BYTES = 2**24
_SCRIPT_FIX = "a program that prints a host in each line, as n1:4, and ends with 0 within 10 s"


class Offer(NamedTuple):
    """The hosts that are offered. read() returns the current ones, maybe none. It raises UserError
    if they cannot be read."""

    read: Callable[[], tuple[Host, ...]]
    is_local: bool = False  # only this machine, without its name


def fixed(hosts: tuple[Host, ...]) -> Offer:
    return Offer(lambda: hosts)


def this_machine(ranks: int) -> Offer:
    return Offer(lambda: (Host("this machine", ranks),), is_local=True)


def of_file(path: Path) -> Offer:
    def read() -> tuple[Host, ...]:
        try:
            with path.open(encoding="utf-8") as file:
                return read_lines(file.read(_LARGEST_BYTES), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the hosts: {error}",
                "--hostfile",
                "a text file with a host in each line: n1 slots=4",
            ) from None

    return Offer(read)


def of_script(path: Path) -> Offer:
    """Returns an offer from a program, which is started without a shell or arguments. Raises
    UserError if it does not exist."""
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise UserError(f"there is no program {path}", "--hosts-from", f"{_SCRIPT_FIX}: chmod +x")

    def read() -> tuple[Host, ...]:
        try:
            done = subprocess.run(
                [path.absolute()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SCRIPT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the program did not end within {SCRIPT_S:g} s",
                f"--hosts-from {path}",
                _SCRIPT_FIX,
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot run the program: {error}", f"--hosts-from {path}", _SCRIPT_FIX
            ) from None
        if done.returncode:
            last = (done.stderr.decode(errors="replace").splitlines() or ["no message"])[-1]
            raise UserError(
                f"the program ended with {done.returncode}: {short(last)}",
                f"--hosts-from {path}",
                _SCRIPT_FIX,
            )
        return read_lines(
            done.stdout[:_LARGEST_BYTES].decode(errors="replace"), f"--hosts-from {path}"
        )

    return Offer(read)


def read_lines(text: str, where: str) -> tuple[Host, ...]:
    """Parses hosts from lines of a hostfile, which may be empty at the moment. Raises UserError."""
    lines = text.splitlines()
    return (
        read_hostfile(lines, where) if any(line.partition("#")[0].strip() for line in lines) else ()
    )


MOST_S = 900.0
FORGOTTEN_S = 600.0  # seconds of work without a failure after which former failures do not count


def left_out_s(failures: int, first_s: float) -> float:
    """Returns how long a host is excluded after this number of failures: first_s, doubled after
    each further one."""
    return float(min(MOST_S, first_s * 2 ** min(failures - 1, 30)))


@dataclass
class _State:
    answers: bool = False
    failures: int = 0
    until_s: float = 0.0  # excluded until then, by the caller's clock


class HostBook:
    """What is known about the hosts. Times are from the caller's monotonic clock. first_s: as in
    left_out_s()."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._offered: tuple[Host, ...] = ()
        self._states: dict[str, _State] = {}

    @property
    def offered(self) -> tuple[Host, ...]:
        return self._offered

    def offer(self, hosts: Sequence[Host]) -> None:
        """From now on, only these hosts are offered. Information about a host is kept while it is
        temporarily not offered."""
        self._offered = tuple(hosts)

    def unknown(self, now_s: float) -> list[str]:
        """Returns the hosts to probe: offered and not excluded."""
        found = (
            (host.name, self._states.setdefault(host.name, _State())) for host in self._offered
        )
        return [name for name, state in found if not state.answers and now_s >= state.until_s]

    def usable(self) -> tuple[Host, ...]:
        """Returns the hosts that are offered and respond."""
        return tuple(
            host for host in self._offered if self._states.get(host.name, _State()).answers
        )

    def answered(self, name: str) -> None:
        self._states.setdefault(name, _State()).answers = True

    def doubt(self, names: Iterable[str]) -> None:
        """Called after a job on these hosts failed; each must respond again before it is used."""
        for name in names:
            state = self._states.setdefault(name, _State())
            state.answers = False
            state.until_s = 0.0

    def failed(self, name: str, now_s: float) -> float:
        """Called if the host does not respond; returns for how many seconds it is excluded."""
        state = self._states.setdefault(name, _State())
        state.failures += 1
        pause_s = left_out_s(state.failures, self._first_s)
        state.answers = False
        state.until_s = now_s + pause_s
        return pause_s

    def worked(self, names: Iterable[str], seconds: float) -> None:
        """Called after a start on these hosts lasted this long."""
        if seconds >= FORGOTTEN_S:
            for name in names:
                self._states[name].failures = 0

    def left_out(self, now_s: float) -> list[str]:
        return [
            host.name
            for host in self._offered
            if self._states.get(host.name, _State()).until_s > now_s
        ]


AT_A_TIME = 32
LOOPBACK_NAME = "localhost"
PROGRAM = ("echo", "answers")
# a host that takes this many times as long as before, and at least the following time, does not
# respond
SLOWER = 5.0
SHORTEST_S = 2.0


class _Probe(NamedTuple):
    process: subprocess.Popen[bytes]
    began_s: float
    # temporary folder for the launcher's session, which a killed launcher does not remove
    folder: tempfile.TemporaryDirectory[str]

    @property
    def has_answered(self) -> bool:
        """Whether the host has responded. The program's output is enough, because Open MPI's mpirun
        may hang after its program has ended (5.0.11: 1 in 20)."""
        if self.process.poll() == 0:
            return True
        with suppress(OSError):  # somebody has removed it
            return PROGRAM[-1].encode() in _output(self.folder.name).read_bytes()
        return False


class Probes:
    """Asks many hosts at a time, without threads. command: the line that runs PROGRAM on a host,
    which has answer_s seconds for it.

    The host of this process answers, of course.
    """

    def __init__(self, command: Callable[[str], Sequence[str]], answer_s: float) -> None:
        self._command = command
        self._answer_s = answer_s
        self._slowest_s: dict[str, float] = {}  # slowest response of each host
        self._running: dict[str, _Probe] = {}
        self._waiting: list[str] = []
        self.error = ""  # why the last host could not be probed; empty if it was

    def ask(self, names: Sequence[str]) -> None:
        """Probes hosts, unless a probe is already running."""
        self._waiting += [
            name for name in names if name not in self._running and name not in self._waiting
        ]

    @property
    def are_open(self) -> bool:
        return bool(self._waiting or self._running)

    def poll(self) -> dict[str, bool]:
        """Returns the hosts that have responded, or failed to, since the last call.

        Hosts that cannot be probed now (no room on the disk, no process) are not included; call
        ask() again.
        """
        reachable = {
            name: True for name in self._waiting if name in (LOOPBACK_NAME, socket.gethostname())
        }
        self._waiting = [name for name in self._waiting if name not in reachable]
        for name, probe in list(self._running.items()):
            answers = probe.has_answered
            seconds = time.monotonic() - probe.began_s
            if not answers and probe.process.poll() is None and seconds < self._limit_s(name):
                continue
            self._end(self._running.pop(name))
            reachable[name] = answers
            if answers:
                self._slowest_s[name] = max(seconds, self._slowest_s.get(name, 0.0))
        while self._waiting and len(self._running) < AT_A_TIME:
            try:
                self._start(self._waiting.pop(0))
                self.error = ""
            except OSError as error:
                self.error = error.strerror or f"{error}"
                self._waiting.clear()
        return reachable

    def _limit_s(self, name: str) -> float:
        """Returns the time limit of a probe. The response time of a host is known after its first
        response, so a lost host is not waited for much longer.

        Other hosts' times are irrelevant: a login that mounts a folder takes ten seconds on one
        host and none on the next.
        """
        slowest_s = self._slowest_s.get(name)
        return (
            self._answer_s
            if slowest_s is None
            else min(self._answer_s, max(SHORTEST_S, SLOWER * slowest_s))
        )

    def close(self) -> None:
        while self._running:
            self._end(self._running.popitem()[1])
        self._waiting.clear()

    def _start(self, name: str) -> None:
        folder = tempfile.TemporaryDirectory(prefix="hvd", ignore_cleanup_errors=True)
        try:
            with _output(folder.name).open("wb") as output:
                process = subprocess.Popen(
                    self._command(name),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "TMPDIR": folder.name},
                    start_new_session=True,
                )
        except OSError:
            folder.cleanup()
            raise
        self._running[name] = _Probe(process, time.monotonic(), folder)

    def _end(self, probe: _Probe) -> None:
        with suppress(ProcessLookupError):
            os.killpg(probe.process.pid, signal.SIGKILL)  # its ssh, too
        probe.process.wait()
        probe.folder.cleanup()


def _output(folder: str) -> Path:
    return Path(folder, "output")


# failures in a row without a step that was not reached before, after which the job is given up
NO_PROGRESS = 5
# mpirun exits with 0 if it has lost a host; SIGKILL and SIGTERM come from outside of a rank, for
# example from a host without memory
_FROM_OUTSIDE = (
    DONE,
    LOST,
    *(128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)),
)
_STARTING = 128 + signal.SIGUSR2  # a request to stop that came before the ranks could listen


class Ended(NamedTuple):
    """How a start of the ranks ended."""

    code: int  # exit code of the launcher
    ending: str  # kind of the job's last event if it ends a job: end, stop, failed; else empty
    step: int  # step that it reached; -1 if it did not start
    stopped: bool = False  # stopped by a signal to the supervisor
    asked: bool = False  # to stop, by the supervisor, so that the hosts change

    @property
    def is_of_a_job_that_was_over(self) -> bool:
        """Whether the job was already complete, so that it writes nothing. A job whose host is lost
        before its first event looks the same."""
        return self.code == DONE and self.ending == "end" and self.step < 0


class Failure(NamedTuple):
    """A start that failed while all of its hosts answer."""

    code: int
    step: int  # see Ended.step

    @property
    def is_own(self) -> bool:
        """Whether it is an error of the job, which would recur, and not a killed rank or a broken
        connection."""
        return self.code not in _FROM_OUTSIDE


class RestartDecision(NamedTuple):
    # end with the code; start on other hosts; find out which host is lost
    action: Literal["finish", "change", "failed"]
    code: int = DONE


def decide(ended: Ended) -> RestartDecision:
    """Decides what the end of a start means, before its hosts are probed."""
    if ended.code == DONE and ended.ending == "end" and ended.step >= 0:
        return RestartDecision("finish")
    if ended.stopped:
        return RestartDecision("finish", ended.code or REQUEUE)
    if ended.asked and ended.code in (REQUEUE, _STARTING):
        return RestartDecision("change")
    # its time limit, or a signal to a rank, handled as without a supervisor
    if ended.code == REQUEUE:
        return RestartDecision("finish", REQUEUE)
    return RestartDecision("failed", ended.code)


def reason_to_give_up(failures: Sequence[Failure], is_first_start: bool) -> str:
    """Returns why the job is not restarted after the last of its failures; empty if it is.

    is_first_start: it was this supervisor's first start; then an error that the user can fix is a
    mistake in the command.
    """
    last = failures[-1]
    own = [failure for failure in failures if failure.is_own]
    if last.code == USER and is_first_start:
        return "it ended by an error that you can fix"
    if last.is_own and len(own) > 1 and own[-2].step == last.step:
        return f"it failed twice {at_step(last.step)} by its own error"
    recent = failures[-NO_PROGRESS:]
    if len(recent) == NO_PROGRESS and max(failure.step for failure in recent) <= recent[0].step:
        return f"it failed {NO_PROGRESS} times without a new step"
    return ""


def at_step(step: int) -> str:
    """Describes where a job ended, from the step of its last event; -1: it has no event."""
    return f"at step {step}" if step >= 0 else "before its first step"


def choose(hosts: Sequence[Host], most: int | None) -> tuple[Host, ...]:
    """Returns the hosts with their numbers of ranks: slots are filled host by host, up to `most`
    ranks."""
    slots = slots_of(hosts)
    return tuple(ranks_per_host(hosts, slots if most is None else min(most, slots)))


def slots_of(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def reason_to_change(
    running: Sequence[Host], ranks: int, offered: Sequence[Host], chosen: Sequence[Host], least: int
) -> str:
    """Returns why a running job is to stop at its next sync point and resume on other hosts; empty
    if it is to keep running.

    running: its hosts, with `ranks` living ranks; offered: the hosts that are offered now; chosen:
    the hosts that a start would get now.
    """
    if slots_of(chosen) < least:
        return ""  # fewer than it may have: it keeps its hosts as long as they live
    names = {host.name for host in offered}
    withdrawn = [host.name for host in running if host.name not in names]
    if withdrawn:
        return f"{', '.join(withdrawn)} {'is' if len(withdrawn) == 1 else 'are'} no longer offered"
    before = _slots(running)
    now = _slots(chosen)
    if (
        any(now.get(name, 0) < slots for name, slots in before.items() if name in now)
        and slots_of(chosen) < ranks
    ):
        return f"{slots_of(chosen)} slots are offered"
    return f"{ranks} ranks could be {slots_of(chosen)}" if slots_of(chosen) > ranks else ""


def _slots(hosts: Sequence[Host]) -> Mapping[str, int]:
    return {host.name: host.slots for host in hosts}

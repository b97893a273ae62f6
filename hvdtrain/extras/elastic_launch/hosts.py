"""The hosts of an elastic job: which are offered, answer and are left out for a while; when a job
starts again on them: pure functions."""

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

from hvdtrain.cli.launch.allocation import Host, read_hostfile
from hvdtrain.cli.launch.launch_commands import ranks_per_host
from hvdtrain.errors import DONE, LOST, REQUEUE, USER, UserError, short

SCRIPT_S = 10.0  # that the program may take
_LARGEST_BYTES = 2**24
_SCRIPT_FIX = "a program that prints a host in each line, as n1:4, and ends with 0 within 10 s"


class Offer(NamedTuple):
    """read(): the hosts that are offered now; may be none. It raises UserError if that cannot be
    told."""

    read: Callable[[], tuple[Host, ...]]
    is_local: bool = False  # this machine alone, without its name


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
    """Raises UserError if there is no such program. It is started without a shell and without
    arguments."""
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
    """Hosts in lines of a hostfile, which may have none just now. Raises UserError."""
    lines = text.splitlines()
    return (
        read_hostfile(lines, where) if any(line.partition("#")[0].strip() for line in lines) else ()
    )


MOST_S = 900.0
FORGOTTEN_S = 600.0  # of work without a failure, after which former ones do not count


def left_out_s(failures: int, first_s: float) -> float:
    """How long a host is left out after so many failures: first_s, and twice as long after each
    further one."""
    return float(min(MOST_S, first_s * 2 ** min(failures - 1, 30)))


@dataclass
class _State:
    answers: bool = False
    failures: int = 0
    until_s: float = 0.0  # left out, by the clock of the caller


class HostBook:
    """Times are those of a monotonic clock, which the caller reads. first_s: as left_out_s()."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._offered: tuple[Host, ...] = ()
        self._states: dict[str, _State] = {}

    @property
    def offered(self) -> tuple[Host, ...]:
        return self._offered

    def offer(self, hosts: Sequence[Host]) -> None:
        """From now on these hosts are offered, and no others. What is known of a host outlives that
        it is gone for a while."""
        self._offered = tuple(hosts)

    def unknown(self, now_s: float) -> list[str]:
        """Hosts to ask whether they answer: offered, and not left out."""
        found = (
            (host.name, self._states.setdefault(host.name, _State())) for host in self._offered
        )
        return [name for name, state in found if not state.answers and now_s >= state.until_s]

    def usable(self) -> tuple[Host, ...]:
        """The hosts that are offered and answer."""
        return tuple(
            host for host in self._offered if self._states.get(host.name, _State()).answers
        )

    def answered(self, name: str) -> None:
        self._states.setdefault(name, _State()).answers = True

    def doubt(self, names: Iterable[str]) -> None:
        """A job on these hosts failed: each has to answer again, at once."""
        for name in names:
            state = self._states.setdefault(name, _State())
            state.answers = False
            state.until_s = 0.0

    def failed(self, name: str, now_s: float) -> float:
        """The host does not answer; returns for how many seconds it is left out."""
        state = self._states.setdefault(name, _State())
        state.failures += 1
        pause_s = left_out_s(state.failures, self._first_s)
        state.answers = False
        state.until_s = now_s + pause_s
        return pause_s

    def worked(self, names: Iterable[str], seconds: float) -> None:
        """A start on these hosts lasted so long."""
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
# a host that takes so much longer than before, and at least so long, does not answer
SLOWER = 5.0
SHORTEST_S = 2.0


class _Probe(NamedTuple):
    process: subprocess.Popen[bytes]
    began_s: float
    # of the launcher's session: a killed one leaves it behind
    folder: tempfile.TemporaryDirectory[str]

    @property
    def has_answered(self) -> bool:
        """The word is enough: Open MPI's mpirun may hang when its program has ended (5.0.11: 1 in
        20)."""
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
        self._slowest_s: dict[str, float] = {}  # of each host's answers
        self._running: dict[str, _Probe] = {}
        self._waiting: list[str] = []
        self.error = ""  # why the last host could not be asked; empty if it was

    def ask(self, names: Sequence[str]) -> None:
        """Asks hosts whether they answer; those that are asked already are not asked twice."""
        self._waiting += [
            name for name in names if name not in self._running and name not in self._waiting
        ]

    @property
    def are_open(self) -> bool:
        return bool(self._waiting or self._running)

    def poll(self) -> dict[str, bool]:
        """The hosts that have answered, or not, since the last call.

        Those that cannot be asked now (no room on the disk, no process) are not in it: ask() again.
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
        """Once a host has answered it is known how long that takes there, so it is not waited for
        any longer where it is lost.

        The others' times say nothing about it: a login that mounts a folder takes ten seconds on
        one host and none on the next.
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
# mpirun ends with 0 where it has lost a host; SIGKILL and SIGTERM come from outside of a rank, as
# from a host that runs out of memory
_FROM_OUTSIDE = (
    DONE,
    LOST,
    *(128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)),
)
_STARTING = 128 + signal.SIGUSR2  # a request to stop that came before the ranks could listen


class Ended(NamedTuple):
    """How a start of the ranks ended."""

    code: int  # of the launcher
    ending: (
        str  # kind of the job's last event, where that ends a job: end, stop, failed; else empty
    )
    step: int  # that it reached; -1 where it did not start
    stopped: bool = False  # by a signal to the supervisor
    asked: bool = False  # to stop, by the supervisor, so that the hosts change

    @property
    def is_of_a_job_that_was_over(self) -> bool:
        """It has nothing to do and writes nothing; so looks a job whose host is lost before its
        first event, too."""
        return self.code == DONE and self.ending == "end" and self.step < 0


class Failure(NamedTuple):
    """A start that failed while all of its hosts answer."""

    code: int
    step: int  # as Ended's

    @property
    def is_own(self) -> bool:
        """An error of the job, which comes again; not a rank that was killed, or a connection that
        broke."""
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
    if ended.code == REQUEUE:  # its time limit, or a signal to a rank: as without a supervisor
        return RestartDecision("finish", REQUEUE)
    return RestartDecision("failed", ended.code)


def reason_to_give_up(failures: Sequence[Failure], is_first_start: bool) -> str:
    """Why the job is not started again after the last of its failures; empty if it is.

    is_first_start: of this supervisor; an error that the user can fix is then a mistake in the
    command.
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
    """Where a job ended whose last event is of this step; -1: it has none."""
    return f"at step {step}" if step >= 0 else "before its first step"


def choose(hosts: Sequence[Host], most: int | None) -> tuple[Host, ...]:
    """The hosts with the ranks that each gets: slots are filled host by host, up to `most`
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

    running: its hosts, with `ranks` living ranks; offered: the hosts that are offered now;
    chosen: those that a start would get now.
    """
    if slots_of(chosen) < least:
        return ""  # fewer than it may have: it keeps what it has as long as that lives
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

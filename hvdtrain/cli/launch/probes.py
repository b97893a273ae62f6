"""Whether a host answers: the launcher starts a program there that prints a word."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

AT_A_TIME = 32
LOOPBACK_NAME = "localhost"
PROGRAM = ("echo", "answers")
SLOWER, SHORTEST_S = 5.0, 2.0  # a host that takes so much longer than before, and at least so long, does not answer


class _Probe(NamedTuple):
    process: subprocess.Popen[bytes]
    began_s: float
    folder: tempfile.TemporaryDirectory[str]  # of the launcher's session: a killed one leaves it behind

    @property
    def has_answered(self) -> bool:
        """The word is enough: Open MPI's mpirun may hang when its program has ended (5.0.11: 1 in 20)."""
        if self.process.poll() == 0:
            return True
        with suppress(OSError):  # somebody has removed it
            return PROGRAM[-1].encode() in _output(self.folder.name).read_bytes()
        return False


class Probes:
    """Asks many hosts at a time, without threads. command: the line that runs PROGRAM on a host, which has answer_s seconds for it.

    The host of this process answers, of course.
    """

    def __init__(self, command: Callable[[str], Sequence[str]], answer_s: float) -> None:
        self._command, self._answer_s = command, answer_s
        self._slowest_s: dict[str, float] = {}  # of each host's answers
        self._running: dict[str, _Probe] = {}
        self._waiting: list[str] = []
        self.error = ""  # why the last host could not be asked; empty where it was

    def ask(self, names: Sequence[str]) -> None:
        """Asks hosts whether they answer; those that are asked already are not asked twice."""
        self._waiting += [name for name in names if name not in self._running and name not in self._waiting]

    @property
    def are_open(self) -> bool:
        return bool(self._waiting or self._running)

    def poll(self) -> dict[str, bool]:
        """The hosts that have answered, or not, since the last call.

        Those that cannot be asked now (no room on the disk, no process) are not in it: ask() again.
        """
        found = {name: True for name in self._waiting if name in (LOOPBACK_NAME, socket.gethostname())}
        self._waiting = [name for name in self._waiting if name not in found]
        for name, probe in list(self._running.items()):
            answers, seconds = probe.has_answered, time.monotonic() - probe.began_s
            if not answers and probe.process.poll() is None and seconds < self._limit_s(name):
                continue
            self._end(self._running.pop(name))
            found[name] = answers
            if answers:
                self._slowest_s[name] = max(seconds, self._slowest_s.get(name, 0.0))
        while self._waiting and len(self._running) < AT_A_TIME:
            try:
                self._start(self._waiting.pop(0))
                self.error = ""
            except OSError as error:
                self.error = error.strerror or f"{error}"
                self._waiting.clear()
        return found

    def _limit_s(self, name: str) -> float:
        """Once a host has answered it is known how long that takes there, so it is not waited for any longer where it is lost.

        The others' times say nothing about it: a login that mounts a folder takes ten seconds on one host and none on the next.
        """
        slowest_s = self._slowest_s.get(name)
        return self._answer_s if slowest_s is None else min(self._answer_s, max(SHORTEST_S, SLOWER * slowest_s))

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

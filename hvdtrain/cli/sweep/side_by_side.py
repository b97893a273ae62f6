"""Processes side by side, each a job; a signal stops all of them with a checkpoint, a second one kills them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hvdtrain.cli.launch.child import start_child
from hvdtrain.cli.launch.run import ECHO_S, STOPPING
from hvdtrain.cli.sweep.trial import Trial
from hvdtrain.core.early_signals import EarlySignals
from hvdtrain.errors import REQUEUE

_POLL_S = 0.05
_LOOK_S = 1.0


@dataclass
class _Running:
    trial: Trial
    child: subprocess.Popen[bytes]
    is_asked: bool = False  # to stop
    is_hopeless: bool = False  # the reason for that


class SideBySide:
    """Starts trials as long as there are some, at most so many at a time."""

    def __init__(self, at_once: int, command: Callable[[Trial], Sequence[str]], log: Callable[[Trial], Path]) -> None:
        self._at_once, self._command, self._log = at_once, command, log
        self._running: dict[int, _Running] = {}  # by slot: 0 to at_once - 1
        self._stopped_s: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal came."""
        return self._stopped_s is not None

    def run(
        self,
        following: Callable[[], Trial | None],
        ended: Callable[[Trial, int, bool], None],
        environment: Callable[[int], Mapping[str, str]],
        is_hopeless: Callable[[Trial], bool] | None = None,
    ) -> None:
        """To the end of all trials that `following` gives.

        ended: called with the exit code of each, and whether it was stopped as hopeless. environment: of a slot. is_hopeless: asked each
        second of the trials that run.
        """
        former = {number: signal.getsignal(number) for number in STOPPING}
        try:
            for number, handler in former.items():
                if handler is not signal.SIG_IGN:  # the parent process set it so, as nohup does with SIGHUP
                    signal.signal(number, self._stop)
                if isinstance(handler, EarlySignals) and handler.received:
                    self._stopped_s = time.monotonic()
            looked_s = time.monotonic()
            while self._start(following, environment):
                time.sleep(_POLL_S)
                self._reap(ended)
                if is_hopeless is not None and time.monotonic() - looked_s > _LOOK_S:
                    looked_s = time.monotonic()
                    self._stop_hopeless(is_hopeless)
        finally:
            self._send(signal.SIGTERM)  # where an error of our own ends this
            for number, handler in former.items():
                signal.signal(number, handler)

    def _start(self, following: Callable[[], Trial | None], environment: Callable[[int], Mapping[str, str]]) -> bool:
        """Fills the free slots; returns whether anything runs."""
        for slot in range(self._at_once):
            if slot in self._running or self.is_stopped or (trial := following()) is None:
                continue
            with self._log(trial).open("ab") as log:  # a session of its own: no signal of the terminal reaches it
                child = start_child(self._command(trial), environment(slot), signal.SIGTERM, new_session=True, output=log)
            self._running[slot] = _Running(trial, child)
            if self.is_stopped:  # meanwhile
                self._ask(self._running[slot])
        return bool(self._running)

    def _reap(self, ended: Callable[[Trial, int, bool], None]) -> None:
        for slot, one in list(self._running.items()):
            status = one.child.poll()
            if status is not None:
                del self._running[slot]
                code = status if status >= 0 else 128 - status
                was_starting = code == 128 + signal.SIGUSR2 and (self.is_stopped or one.is_asked)  # its Python was not running yet
                ended(one.trial, REQUEUE if was_starting else code, one.is_hopeless)

    def _stop_hopeless(self, is_hopeless: Callable[[Trial], bool]) -> None:
        for one in self._running.values():
            if not one.is_asked and is_hopeless(one.trial):
                one.is_hopeless = True
                self._ask(one)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
            for one in list(self._running.values()):
                self._ask(one)
            os.write(2, b"hvdtrain sweep: stopping all trials with a checkpoint; again to kill them\n")
        elif time.monotonic() - self._stopped_s > ECHO_S:
            self._send(signal.SIGKILL)

    @staticmethod
    def _ask(one: _Running) -> None:
        """To stop with a checkpoint. Once: a second request would kill it."""
        if not one.is_asked:
            one.is_asked = True
            one.child.send_signal(signal.SIGUSR2)

    def _send(self, number: int) -> None:
        for one in list(self._running.values()):
            one.child.send_signal(number)  # does nothing where it has ended

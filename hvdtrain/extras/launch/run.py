"""A launcher as a child of this process, shielded from the terminal's signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType

from hvdtrain.core.early_signals import ECHO_S, STOPPING, EarlySignals
from hvdtrain.core.process import print_stderr, start_child
from hvdtrain.errors import REQUEUE


class LauncherRun:
    """One launcher, from its start to its end: Ctrl-C stops the job with a checkpoint, a second one
    kills it.

    is_job: its ranks run hvdtrain, which saves a checkpoint on a request to stop; a script may do
    something else.
    """

    def __init__(self, command: Sequence[str], *, is_job: bool = True) -> None:
        self._command = command
        self._is_job = is_job
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_s: float | None = None  # time.monotonic() of the first signal
        self._killed = 0  # number of the second signal
        self._asked = self._is_terminated = False

    @property
    def stopped(self) -> bool:
        """Whether a signal came."""
        return self._stopped_s is not None

    def ask_to_stop(self) -> None:
        """Sends the ranks a request to stop, as the first signal does."""
        self._asked = True
        self._send(signal.SIGUSR2)

    def kill(self) -> None:
        """Ends the launcher, whose ranks have ended; a second call kills it."""
        self._send(signal.SIGKILL if self._is_terminated else signal.SIGTERM)
        self._is_terminated = True

    def run(self, look: Callable[[], None] | None = None, look_s: float = 1.0) -> int:
        """Returns the exit code of the launcher; 75 if a job was stopped before its ranks could
        listen.

        look: called every look_s seconds while the launcher runs.
        """
        former = {number: signal.getsignal(number) for number in STOPPING}
        try:
            for number, handler in former.items():
                if isinstance(handler, EarlySignals) and handler.received:
                    self._stopped_s = time.monotonic()
                if (
                    handler is not signal.SIG_IGN
                ):  # set by the parent process, as nohup does for SIGHUP
                    signal.signal(number, self._stop)
            # In its own session the launcher gets no signal of the terminal, after which it would
            # kill the ranks within half a second.
            self._child = start_child(self._command, os.environ, signal.SIGTERM, new_session=True)
            if self._stopped_s is not None:  # the signal came before the child started
                self._child.send_signal(signal.SIGUSR2)
            return self._exit_code(self._wait(self._child, look, look_s))
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    @staticmethod
    def _wait(
        child: subprocess.Popen[bytes], look: Callable[[], None] | None, look_s: float
    ) -> int:
        if look is None:
            return child.wait()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(look_s)
            look()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. SIGUSR2, which every launcher passes on, asks ranks to stop."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
            if not self._asked:  # a second request would kill the ranks
                self._send(signal.SIGUSR2)
            print_stderr(
                f"hvdtrain launch: stopping{' at the next sync point' * self._is_job}; again to "
                "kill"
            )
        elif time.monotonic() - self._stopped_s > ECHO_S:
            self._send(signal.SIGKILL if self._killed else signal.SIGTERM)
            self._killed = number

    def _send(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)  # does nothing if the child has ended

    def _exit_code(self, status: int) -> int:
        if self._killed:
            return 128 + self._killed
        code = status if status >= 0 else 128 - status
        # the signal ended the launcher, or a rank whose Python was not running yet
        was_starting = code == 128 + signal.SIGUSR2
        return REQUEUE if self._stopped_s is not None and was_starting and self._is_job else code

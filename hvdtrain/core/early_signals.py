"""Remembers signals that ask for a checkpoint before the job can handle them, from the first line
of the program on."""

from __future__ import annotations

import signal
from types import FrameType

# by default they kill; mpirun and srun pass them on to ranks that are still starting
REMEMBERED = (
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# stop a job with a checkpoint; a second one kills it
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *REMEMBERED)
ECHO_S = 1.0  # a repetition within this time is the same signal


class EarlySignals:
    """A signal handler. `received` is 0, or the number of the first signal, which the next handler
    reads."""

    def __init__(self) -> None:
        self.received = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def install(self) -> None:
        """Installs the handler, in the main thread. Signals that the parent process ignores stay
        ignored."""
        for number in REMEMBERED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self)

    def remove(self) -> None:
        """Removes the handler, for a command that saves nothing: signals end it, including one
        already received."""
        for number in REMEMBERED:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_DFL)
        if self.received:
            signal.raise_signal(self.received)

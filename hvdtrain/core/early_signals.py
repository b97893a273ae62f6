"""Signals that ask for a checkpoint before the job can listen: remembered from the first line of
the program on, and handed over."""

from __future__ import annotations

import signal
from types import FrameType

# their default kills; mpirun and srun pass them on to ranks that only start
REMEMBERED = (
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class EarlySignals:
    """A handler. `received` is 0, or the number of the first signal that came; who installs the
    next handler reads it."""

    def __init__(self) -> None:
        self.received = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def install(self) -> None:
        """In the main thread. What the parent process ignores stays ignored."""
        for number in REMEMBERED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self)

    def remove(self) -> None:
        """For a command that saves nothing: the signals end it, one that has come too."""
        for number in REMEMBERED:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_DFL)
        if self.received:
            signal.raise_signal(self.received)

"""The sink of rank 0's standard output: a display that updates in place on an interactive terminal,
plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import time
from collections.abc import Callable
from typing import IO, TextIO

from hvdtrain.config.sections.log import LogConfig
from hvdtrain.core.process import print_stderr
from hvdtrain.events.background_sink import BackgroundSink
from hvdtrain.events.log import Event
from hvdtrain.events.writers import OutputStream, Pace, TextWriter

NAME = "the standard output"
# events that wait while the reader has paused; step events are dropped first, oldest first
CAPACITY = 100
REFRESH_S = 1.0  # refresh interval of the display, which takes 2 ms


class TerminalSink:
    """Writes on a thread, so that training never waits for a reader: if it is slow, events of steps
    are dropped and their lines counted.

    If the reader exits or the stream is closed, the error is reported once, and training continues
    without the output.
    """

    def __init__(
        self, background: BackgroundSink, is_shown: Callable[[Event], bool], *, has_display: bool
    ) -> None:
        self._background = background
        self._is_shown = is_shown
        self._has_display = has_display
        self._redirected: list[_LinesToDisplay] = []

    def __call__(self, event: Event) -> None:
        if self._has_display and event.kind == "start":
            self._redirect()
        if event.kind in ("end", "stop", "failed"):
            self._restore()
        if self._is_shown(event):
            self._background(event)

    def finish(self) -> None:
        self._restore()
        self._background.finish()

    def close(self, timeout_s: float) -> None:
        self._restore()
        self._background.close(timeout_s)

    def _redirect(self) -> None:
        """Makes other output of the job scroll above the display, too."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_interactive(stream):
                self._redirected.append(_LinesToDisplay(name, stream, self._background))
                setattr(sys, name, self._redirected[-1])

    def _restore(self) -> None:
        for redirected in self._redirected:
            redirected.stop()
            if getattr(sys, redirected.name) is redirected:
                setattr(sys, redirected.name, redirected.stream)
        self._redirected.clear()


class _LinesToDisplay(io.TextIOBase):
    """Replaces sys.stdout or sys.stderr: whole lines become events, and the display shows them."""

    def __init__(self, name: str, stream: TextIO, background: BackgroundSink) -> None:
        self.name = name
        self.stream = stream
        self._background = background
        self._begun = ""  # an incomplete line
        self._stopped = False  # then code that kept this object writes to the stream

    def write(self, text: str) -> int:
        if self._stopped:
            return self.stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._background(Event(time.time(), "printed", 0, {"lines": lines}))
        return len(text)

    def stop(self) -> None:
        if self._begun:
            self.write("\n")
        self._stopped = True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding


def warn(message: str) -> None:
    """Writes a line to the standard error; does nothing if that fails."""
    print_stderr(f"hvdtrain: {message}", 1.0)


def terminal_sink(out: IO[str], config: LogConfig) -> TerminalSink:
    """Returns the sink for rank 0's standard output, selected by log.display and log.every_s."""
    if config.display == "live" or (config.display == "auto" and is_interactive(out)):
        from hvdtrain.events.progress_display import ProgressDisplay

        display = ProgressDisplay(OutputStream(out), lambda: terminal_size(out))
        background = BackgroundSink(
            display, NAME, warn, CAPACITY, on_drop=display.drop, tick=display.tick, tick_s=REFRESH_S
        )
        return TerminalSink(background, lambda event: True, has_display=True)
    if type(out) is io.TextIOWrapper and out.write_through:
        # python -u, as torchrun starts a script: print() would write its text and its newline
        # separately, and a line of the job might come between them
        out.reconfigure(line_buffering=True, write_through=False)
    writer = TextWriter(OutputStream(out))
    background = BackgroundSink(writer, NAME, warn, CAPACITY, on_drop=writer.drop)
    return TerminalSink(background, Pace(config.every_s), has_display=False)


def is_interactive(out: IO[str] | None) -> bool:
    """Whether a person reads the output live: a terminal with a size and a TERM.

    Open MPI's mpirun gives ranks a terminal without a size, even if its own output is a pipe.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return out is not None and out.isatty() and os.get_terminal_size(out.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def terminal_size(out: IO[str]) -> os.terminal_size:
    """Returns size of the terminal that shows the output; 80 x 24 if there is none.

    Open MPI's mpirun gives rank 0 a separate terminal, and does not resize it when mpirun's own
    terminal is resized.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        with contextlib.suppress(OSError):
            return _size_of(f"/proc/{os.getppid()}/fd/1")
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(out.fileno())
        if size.columns and size.lines:
            return size
    return os.terminal_size((80, 24))


def _size_of(path: str) -> os.terminal_size:
    """Returns the size of a terminal. Raises OSError if the path is not a terminal."""
    if not stat.S_ISCHR(os.stat(path).st_mode):
        raise OSError(f"{path} is not a terminal")
    number = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        size = os.get_terminal_size(number)
    finally:
        os.close(number)
    if not size.columns or not size.lines:
        raise OSError(f"{path} has no size")
    return size

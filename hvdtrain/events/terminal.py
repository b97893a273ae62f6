"""The sink of rank 0's standard output: a display that updates in place on an interactive terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

from hvdtrain.config.schema import LogConfig
from hvdtrain.events.log import Event, Sink
from hvdtrain.events.writers import TextWriter


class TerminalSink:
    """Passes events to another sink until that fails: the first error is reported once, and training goes on without the output.

    Raises BrokenPipeError: the reader of the output has gone away, as mpirun does when a job is ended.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink  # None after an error

    def __call__(self, event: Event) -> None:
        if self.sink is None:
            return
        try:
            self.sink(event)
        except BrokenPipeError:
            raise
        except Exception as error:  # the stream was closed, or replaced by an object that fails
            self.close(0.0)
            self.sink = None
            warn(f"cannot write to the standard output: {type(error).__name__}: {error}; training goes on, events.jsonl has every event")

    def close(self, timeout_s: float) -> None:
        close = getattr(self.sink, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close(timeout_s)


def warn(message: str) -> None:
    """Writes a line to the standard error; does nothing where that cannot be written."""
    with contextlib.suppress(OSError):
        print(f"hvdtrain: {message}", file=sys.stderr, flush=True)


def terminal_sink(out: IO[str], config: LogConfig) -> TerminalSink:
    """The sink for rank 0's standard output, as log.display and log.every_s ask."""
    if config.display == "live" or (config.display == "auto" and is_interactive(out)):
        from hvdtrain.events.progress_display import ProgressDisplay

        return TerminalSink(ProgressDisplay(out))
    return TerminalSink(TextWriter(out, config.every_s))


def is_interactive(out: IO[str] | None) -> bool:
    """Whether a person reads the output as it comes: a terminal with a size and a TERM.

    Open MPI's mpirun gives ranks a terminal without a size, even where its own output is a pipe.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return out is not None and out.isatty() and os.get_terminal_size(out.fileno()).columns > 0
    except (OSError, ValueError):
        return False

"""What people see on the screen: a display that moves where somebody sits before a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

from hvdtrain.config.schema_run import LogConfig
from hvdtrain.events.log import Event, Sink
from hvdtrain.events.writers import Console


class Screen:
    """A sink that lets training go on without it: an error in the one within is told once, and that gets nothing more.

    BrokenPipeError is raised: nobody is there any more.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink

    def __call__(self, event: Event) -> None:
        if self.sink is None:
            return
        try:
            self.sink(event)
        except BrokenPipeError:
            raise
        except Exception as error:  # of a stream that was closed, or of what somebody put in its place
            self.close(0.0)
            self.sink = None
            complain(f"the screen: {type(error).__name__}: {error}; training goes on without it, and events.jsonl has all")

    def close(self, timeout_s: float) -> None:
        with contextlib.suppress(Exception):
            getattr(self.sink, "close", lambda _: None)(timeout_s)


def complain(text: str) -> None:
    """On the standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)


def screen(out: IO[str], log: LogConfig) -> Screen:
    """The sink of rank 0's standard output."""
    return Screen(_screen(out, log))


def _screen(out: IO[str], log: LogConfig) -> Sink:
    if log.display == "live" or (log.display == "auto" and is_watched(out)):
        from hvdtrain.events.progress_display import Live

        return Live(out)
    return Console(out, log.every_s)


def is_watched(out: IO[str] | None) -> bool:
    """Whether a person looks at it. Open MPI's mpirun gives ranks a terminal even where its own output is a pipe: one without a size."""
    try:
        return (
            out is not None and out.isatty() and os.get_terminal_size(out.fileno()).columns > 0 and os.environ.get("TERM", "dumb") != "dumb"
        )
    except (OSError, ValueError):
        return False

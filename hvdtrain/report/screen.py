"""What people see on the screen: a display that moves where somebody sits before a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
from typing import IO

from hvdtrain.config_run import LogConfig
from hvdtrain.report.log import Sink
from hvdtrain.report.sinks import Console


def screen(out: IO[str], log: LogConfig) -> Sink:
    """The sink of rank 0's standard output."""
    if log.display == "live" or (log.display == "auto" and is_watched(out)):
        from hvdtrain.report.live import Live

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

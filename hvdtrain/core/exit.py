"""Ends a process whose other threads, or other ranks, may hang."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """Ends this process at once, from any thread, without the clean-up at exit, which would wait for other ranks."""
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flushes the standard output and the standard error; a closed pipe is ignored, so that it keeps no rank alive."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()

"""Waiting in tests: until something has happened, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

GLANCE_S = 0.02  # between two looks


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 300) -> None:
    """Waits until the condition holds. Fails with `what` if it does not hold within limit_s, which
    only ends a hanging test."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(GLANCE_S)


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped by SIGSTOP: kill() returns before, and a thread
    ends its system call first."""
    try:
        states = [
            path.read_text().rpartition(")")[2].split()[0]
            for path in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
        return False
    return set(states) == {"T"}

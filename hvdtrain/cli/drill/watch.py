"""What a running job writes, read from outside, and the wait for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOOK_S = 0.05


def wait(condition: Callable[[], Any], limit_s: float) -> Any:
    """What the condition returns once that is true; its last value after limit_s.

    It takes a fifth of a processor at most: the job is on the same machine.
    """
    end_s = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        value = condition()
        now_s = time.monotonic()
        if value or now_s >= end_s:
            return value
        time.sleep(max(_LOOK_S, 4 * (now_s - began_s)))


def lines_of(path: Path, *, with_step: bool = True) -> list[dict[str, Any]]:
    """The events of a file that may be growing: whole lines only, of which each has a kind, a time, and where `with_step` a step."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                event = json.loads(line[max(0, line.rfind('{"time":')) :])
            except (ValueError, RecursionError):
                continue
            if _is_event(event, with_step):
                found.append(event)
    return found


def _is_event(found: Any, with_step: bool) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str) or not isinstance(found.get("time"), int | float):
        return False
    return isinstance(found.get("step"), int) or not with_step

"""What a running job writes, read from outside, and the wait for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOOK_S = 0.05


def wait(condition: Callable[[], Any], limit_s: float) -> Any:
    """What the condition returns once that is true; its last value after limit_s."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return value


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of a file that may be growing: whole lines only."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                found.append(json.loads(line[max(0, line.rfind('{"time":')) :]))
            except ValueError:
                continue
    return found

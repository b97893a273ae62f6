"""What a script's own loop has logged, read back from the events of its run."""

from __future__ import annotations

import math

from hvdtrain.report.run import Fields, RunRecord, number

_LONGEST = 40  # characters of a name
_MOST = 50  # names


def logged_names(run: RunRecord) -> list[str]:
    """In the order of their first events."""
    names = dict.fromkeys(name for event in run.events for name in _values(event))
    return [name for name in names if name.isprintable() and 0 < len(name) <= _LONGEST][:_MOST]


def logged(run: RunRecord, name: str) -> tuple[list[Fields], list[float]]:
    """The events of steps that have it, and its value in each."""
    events = [event for event in run.step_events() if name in _values(event)]
    return events, [number({"value": _values(event)[name]}, "value") for event in events]


def finite_values(run: RunRecord, name: str) -> list[float]:
    return [value for value in logged(run, name)[1] if math.isfinite(value)]


def _values(event: Fields) -> Fields:
    values = event.get("logged") if event["kind"] == "step" else None
    return values if isinstance(values, dict) else {}

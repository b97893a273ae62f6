"""One stream of events: what happened, when, at which step. Sinks see everything and change nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Event(NamedTuple):
    time: float  # seconds since 1970
    kind: str  # "start", "step", "epoch", ...: docs/events.md has them all, with their fields
    step: int  # steps of the job done
    fields: dict[str, Any]  # "lines": what people are told


Sink = Callable[[Event], None]


class Log:
    """Hands each event to every sink, and closes those that have something to close. Rank 0 has sinks; the other ranks have none."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def emit(self, kind: str, step: int, **fields: Any) -> None:
        """What a sink raises is raised when every other has the event, too: the first, where several do."""
        event, errors = Event(time.time(), kind, step, fields), list[Exception]()
        for sink in self._sinks:
            try:
                sink(event)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self, timeout_s: float) -> None:
        """What still waits to be written somewhere is, if that takes no longer for all sinks together."""
        end_s = time.monotonic() + timeout_s
        for sink in self._sinks:
            getattr(sink, "finish", lambda: None)()
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if close is not None:
                close(max(0.0, end_s - time.monotonic()))

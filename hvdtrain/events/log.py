"""One stream of events: what happened, when, at which step. Every sink receives every event and changes none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Event(NamedTuple):
    time: float  # seconds since 1970
    kind: str  # "start", "step", "epoch", ...: docs/events.md lists them all, with their fields
    step: int  # steps of the job done
    fields: dict[str, Any]  # "lines": text for people


# A sink is called with each event. Two optional methods: finish() says that no event follows and returns at once;
# close(timeout_s) waits until everything is written, timeout_s at most.
Sink = Callable[[Event], None]


class Tracker(Protocol):
    """Sends events to another product: what events/trackers/*.py build. BackgroundSink runs it on a thread of its own."""

    def __call__(self, event: Event, /) -> None: ...

    def close(self) -> None:
        """Called once, after the last event: sends what is left."""


class Log:
    """Hands each event to every sink, in the order of the sinks, and closes them. Rank 0 has sinks; the other ranks have none."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def emit(self, kind: str, step: int, **fields: Any) -> None:
        """Hands an event to every sink. Raises the first exception of a sink, after all sinks have been called."""
        event = Event(time.time(), kind, step, fields)
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink(event)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self, timeout_s: float) -> None:
        """Waits until all sinks have written what they hold, timeout_s at most for all of them together."""
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:  # before the first close(): they write at the same time
            finish = getattr(sink, "finish", None)
            if finish is not None:
                finish()
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if close is not None:
                close(max(0.0, deadline - time.monotonic()))

"""One stream of events for all sinks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Event(NamedTuple):
    time: float  # seconds since 1970
    kind: str  # "start", "step", "epoch", ...: docs/events.md lists them all, with their fields
    step: int  # steps of the job done
    fields: dict[str, Any]  # "lines": text for people


# A sink is called with each event. Two optional methods: finish() announces that no more events
# follow and returns at once; close(timeout_s) waits until everything is written, at most timeout_s.
Sink = Callable[[Event], None]


class Tracker(Protocol):
    """Sends events to another product; built by events/trackers/*.py. BackgroundSink runs it on a
    separate thread."""

    def __call__(self, event: Event, /) -> None: ...

    def close(self) -> None:
        """Called once, after the last event: sends what is left."""


RECENT = 100  # events


class Log:
    """Hands each event to every sink, in the order of the sinks, and closes them. Rank 0 has sinks;
    the other ranks have none."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._start: Event | None = None
        self._recent = deque[Event](maxlen=RECENT)  # recent events of a rank without sinks

    def open(
        self, record: Sink, others: Sequence[Sink], is_missing: Callable[[Event], bool]
    ) -> None:
        """Adds sinks on a rank that had none; from now on they get the events.

        record: the sink of the file that an earlier rank 0 wrote; it gets the last events that the
        file lacks. The other sinks get the event "start".
        """
        assert not self._sinks
        for event in filter(is_missing, self._recent):
            record(event)
        if self._start is not None:
            start = self._start._replace(fields=self._start.fields | {"lines": []})
            for sink in others:
                sink(start)
        self._sinks = [record, *others]

    def emit(self, kind: str, step: int, **fields: Any) -> None:
        """Hands an event to every sink. Raises the first exception of a sink, after all sinks have
        been called."""
        event = Event(time.time(), kind, step, fields)
        if not self._sinks:
            self._start = event if kind == "start" else self._start
            self._recent.append(event)
            return
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink(event)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self, timeout_s: float) -> None:
        """Waits until all sinks have written what they hold, timeout_s at most for all of them
        together."""
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:  # before the first close(), so that they write at the same time
            finish = getattr(sink, "finish", None)
            if finish is not None:
                finish()
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if close is not None:
                close(max(0.0, deadline - time.monotonic()))

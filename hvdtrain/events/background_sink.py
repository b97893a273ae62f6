"""A sink that runs on a separate thread with a bounded queue, so that training never waits for a
tracker or the terminal."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from hvdtrain.errors import UserError
from hvdtrain.events.log import Event, Tracker
from hvdtrain.events.redaction import redact_urls

CAPACITY = 10_000  # queued events; a few megabytes
CLOSE_S = 30.0  # how long the end of a job waits for queued events
LONGEST_MESSAGE = 300  # characters
# dropped, oldest first, when the queue is full; events of other kinds are few and always kept
_STEP_KINDS = (
    "step",
    "step_times",
    "printed",
)


class BackgroundSink:
    """Runs a tracker on a thread. A call costs microseconds.

    name: of the tracker, for messages: "log.trackers wandb".
    warn: called with one line when the tracker fails, drops events or does not end in time; always
    on the thread of the caller, at its
        next event or at close(), so it may use what that thread uses. After an exception the
        tracker receives no more events.
    step_interval_s: an event of a step kind that follows the previous one sooner is skipped. A
        tracker takes milliseconds for each, during which the interpreter runs nothing else.
    on_drop: called with each event that is dropped, on the thread of the caller; without it,
        close() warns how many were dropped. tick: called on the thread every tick_s seconds, unless
        the tracker takes longer.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        warn: Callable[[str], None],
        capacity: int = CAPACITY,
        step_interval_s: float = 0.0,
        *,
        on_drop: Callable[[Event], None] | None = None,
        tick: Callable[[], None] | None = None,
        tick_s: float = 1.0,
    ) -> None:
        self._tracker = tracker
        self._name = name
        self._warn = warn
        self._capacity = capacity
        self._step_interval_s = step_interval_s
        self._on_drop = on_drop
        self._tick = tick
        self._tick_s = tick_s
        self._ticked_s = time.monotonic()
        self._next_step_s: dict[
            str, float
        ] = {}  # step kind -> the time from which its next event is accepted
        # Both queues hold (number of the call, event): the thread takes the lower number first.
        self._step_events = deque[tuple[int, Event]]()
        self._other_events = deque[tuple[int, Event]]()
        self._calls = 0
        self._dropped = 0
        self._closing = False  # no more events follow
        self._closed = False  # close() has reported
        self._ended = False  # the thread accepts no more events
        self._failure = ""  # not yet reported
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if event.kind not in _STEP_KINDS:
            self._enqueue(event, self._other_events)
        elif self._is_due(event):
            self._enqueue(event, self._step_events)
        self._report_failure()

    def finish(self) -> None:
        """Announces that no event follows: the thread passes on queued events, closes the tracker
        and ends. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits at most timeout_s until all events are passed on and the tracker is closed; False
        if that took longer.

        The thread then still runs, and the interpreter may wait for it at exit.
        """
        self.finish()
        self._thread.join(timeout_s)
        self._report_failure()
        queued = len(self._step_events) + len(self._other_events)
        done = not self._thread.is_alive()
        if self._closed:
            return done
        self._closed = True
        if self._dropped:
            self._warn(
                f"{self._name}: too slow: its queue was full and {self._dropped} step events were "
                "dropped"
            )
        if not done:
            self._warn(
                f"{self._name}: not finished after {timeout_s:g} s: {queued} events are still "
                "queued, and the job ends"
            )
        return done

    def _is_due(self, event: Event) -> bool:
        due_s = self._next_step_s.get(event.kind, 0.0)
        if (
            due_s - self._step_interval_s < event.time < due_s
        ):  # earlier than that: the clock was set back
            return False
        self._next_step_s[event.kind] = event.time + self._step_interval_s
        return True

    def _enqueue(self, event: Event, queue: deque[tuple[int, Event]]) -> None:
        with self._changed:
            if self._ended or self._closing:
                return
            queue.append((self._calls, event))
            self._calls += 1
            if (
                self._step_events
                and len(self._step_events) + len(self._other_events) > self._capacity
            ):
                self._drop(self._step_events.popleft()[1])
            self._changed.notify()

    def _drop(self, event: Event) -> None:
        if self._on_drop is not None:
            self._on_drop(event)
        else:
            self._dropped += 1

    def _report_failure(self) -> None:
        if self._failure:
            failure = self._failure
            self._failure = ""
            self._warn(f"{self._name}: {failure}; training continues without it")

    def _run(self) -> None:
        try:
            while not self._is_over():
                event = self._next_event()
                if event is not None:
                    self._tracker(event)
                self._tick_if_due()
            self._tracker.close()
        except (
            Exception,
            SystemExit,
        ) as error:  # code of another product must not end training, whatever it raises
            self._failure = _one_line(error)
        with self._changed:
            self._ended = True
            self._step_events.clear()
            self._other_events.clear()

    def _is_over(self) -> bool:
        with self._changed:
            return self._closing and not self._step_events and not self._other_events

    def _next_event(self) -> Event | None:
        """Waits for the oldest event; None if none comes before the next tick, or if no more will
        come."""
        wait_s = max(0.0, self._ticked_s + self._tick_s - time.monotonic()) if self._tick else None
        with self._changed:
            self._changed.wait_for(
                lambda: self._step_events or self._other_events or self._closing, wait_s
            )
            queues = [queue for queue in (self._step_events, self._other_events) if queue]
            if not queues:
                return None
            _, event = min(queues, key=lambda queue: queue[0][0]).popleft()
            return event

    def _tick_if_due(self) -> None:
        if self._tick is not None and time.monotonic() - self._ticked_s >= self._tick_s:
            self._tick()
            self._ticked_s = time.monotonic()


def _one_line(error: BaseException) -> str:
    message = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return redact_urls(" ".join(message.split()))[:LONGEST_MESSAGE]

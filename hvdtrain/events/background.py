"""A sink on a thread of its own behind a bounded queue: training never waits for it, and goes on without it when it fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hvdtrain.errors import UserError
from hvdtrain.events.log import Event, Sink
from hvdtrain.events.redaction import without_login

MOST = 10_000  # events that wait; a few megabytes
CLOSE_S = 30.0  # that the end of a job waits for what is not written yet
_MANY = ("step", "step_times")  # the kinds whose oldest go when the queue is full; of the others there are few


class BackgroundSink:
    """A call costs microseconds. `make` runs on the thread too, since a tracker's packages take seconds to import.

    An exception in it is told once, and nothing is given to it any more. What there is to tell is told by `warn` in the thread that
    calls this, at its next event or at close(), so `warn` may use what that thread uses. Events of steps come at most once in `every_s`:
    what a tracker does with one takes milliseconds, in which Python can do nothing else.
    """

    def __init__(self, make: Callable[[], Sink], name: str, warn: Callable[[str], None], most: int = MOST, every_s: float = 0.0) -> None:
        self._make, self._name, self._warn, self._most, self._every_s = make, name, warn, most, every_s
        self._due_s: dict[str, float] = {}  # when the next of a kind of step events is wanted
        self._many, self._few = deque[tuple[int, Event]](), deque[tuple[int, Event]]()  # each with its place in the order of calls
        self._changed = threading.Condition()
        self._count = self._lost = 0
        self._closing = self._closed = self._over = False
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if event.kind in _MANY:
            due_s = self._due_s.get(event.kind, 0.0)
            if due_s - self._every_s < event.time < due_s:  # a clock that was set back must not silence it
                return
            self._due_s[event.kind] = event.time + self._every_s
        with self._changed:
            if not self._over and not self._closing:
                (self._many if event.kind in _MANY else self._few).append((self._count, event))
                self._count += 1
                if self._many and len(self._many) + len(self._few) > self._most:
                    self._many.popleft()
                    self._lost += 1
                self._changed.notify()
        self._tell()

    def finish(self) -> None:
        """Nothing more comes: it may write what it has, and close."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits until all is written and the sink is closed, timeout_s at most; False where some of that is left undone.

        Where it is, the thread still works: a process that ends by the usual way may then wait for it in its last clean-up.
        """
        self.finish()
        again, self._closed = self._closed, True
        self._thread.join(timeout_s)
        self._tell()
        left, done = len(self._many) + len(self._few), not self._thread.is_alive()
        if again:
            return done
        if self._lost:
            self._warn(f"log.trackers {self._name}: too slow: {self._lost} step events found no room in its queue, and were left out")
        if not done:
            self._warn(f"log.trackers {self._name}: not done after {timeout_s:g} s: {left} events wait, and the end does not wait for them")
        return done

    def _tell(self) -> None:
        if self._failure:
            failure, self._failure = self._failure, ""
            self._warn(f"log.trackers {self._name}: {failure}; training goes on without it")

    def _run(self) -> None:
        try:
            sink = self._make()
            while (event := self._next()) is not None:
                sink(event)
            close = getattr(sink, "close", None)
            if close is not None:
                close()
        except (Exception, SystemExit) as error:  # somebody else's code: whatever it is, training must not end by it
            self._failure = _words(error)
        with self._changed:
            self._over = True
            self._many.clear()
            self._few.clear()

    def _next(self) -> Event | None:
        """The oldest event, waited for; None when no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._many or self._few or self._closing)
            waiting = [queue for queue in (self._many, self._few) if queue]
            return min(waiting, key=lambda queue: queue[0][0]).popleft()[1] if waiting else None


def _words(error: BaseException) -> str:
    """One line."""
    text = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return without_login(" ".join(text.split()))[:300]

"""A thread that makes a rank's collectives in the order in which they were started, while the main thread computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hvdtrain.comm.communicator import Buffer


class CommThread:
    """Makes the collectives of one MPI communicator, which nothing else uses. A daemon thread that starts with the first collective."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Future | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, collective: Callable[[], Buffer]) -> Future:
        """Queues a call of `collective` behind all that were started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdtrain-comm", daemon=True)
            self._thread.start()
        future = Future(collective)
        self._queue.put(future)
        return future

    def stop(self) -> None:
        """Returns once the thread has ended, behind what was started before; nothing is started after. Not on that thread.

        It may be the last to hold tensors: one that lets go of them while the interpreter ends aborts the process.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (future := self._queue.get()) is not None:
            future.run()


class Future:
    """A Handle whose collective is made by another thread."""

    def __init__(self, collective: Callable[[], Buffer]) -> None:
        self._collective, self._done = collective, threading.Event()
        self._result: Buffer = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the collective; an exception is raised by wait()."""
        try:
            self._result = self._collective()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> Buffer:
        """The result. Raises what the collective raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

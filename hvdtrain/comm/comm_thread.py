"""A thread that makes a rank's collectives in the order in which they were started, while the main thread computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hvdtrain.comm.communicator import Buffer


class CommThread:
    """One for each communicator that it alone uses. Its thread starts with the first collective, and does not keep the process alive."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Future] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], Buffer]) -> Future:
        """call(), after all that were started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hvdtrain-courier", daemon=True)
            self._thread.start()
        errand = Future(call)
        self._queue.put(errand)
        return errand

    def _work(self) -> None:
        while True:
            self._queue.get().do()


class Future:
    """A Handle."""

    def __init__(self, call: Callable[[], Buffer]) -> None:
        self._call, self._over = call, threading.Event()
        self._result: Buffer = None
        self._error: BaseException | None = None

    def do(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._over.set()

    def wait(self) -> Buffer:
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result

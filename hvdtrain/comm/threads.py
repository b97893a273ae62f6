"""Ranks that are threads of one process, with the collectives that a replay of asynchronous
training needs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from hvdtrain.comm.communicator import Buffer, CompletedHandle, Handle
from hvdtrain.comm.engines import Feature

T = TypeVar("T")
_REDUCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
_LOOK_S = 0.1  # between two checks whether another thread has failed


class ThreadRanks:
    """The state that the threads, each a rank, share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.board: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.messages: dict[tuple[int, int], dict[int, SimpleQueue[Any]]] = defaultdict(
            lambda: defaultdict(SimpleQueue)
        )
        self._lock = threading.Lock()

    def queue(self, to: int, tag: int, source: int) -> SimpleQueue[Any]:
        with self._lock:
            return self.messages[to, tag][source]

    def get(self, queue: SimpleQueue[T]) -> T:
        """Waits for an item. Raises threading.BrokenBarrierError if another thread has failed."""
        while True:
            try:
                return queue.get(timeout=_LOOK_S)
            except Empty:
                if self.barrier.broken:
                    raise threading.BrokenBarrierError from None


class ThreadCommunicator:
    """The communicator of one thread. Sums are computed in rank order."""

    name = "threads"
    # as if each were alone on its host, so that threads do not divide resources
    local_rank = 0
    local_size = 1
    features: frozenset[Feature] = frozenset({"p2p", "several_ranks"})
    secret: str | None = None

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def allgather_object(self, thing: Any) -> list[Any]:
        self._ranks.board[self.rank] = thing
        self._ranks.barrier.wait()
        objects = list(self._ranks.board)
        self._ranks.barrier.wait()
        return objects

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        return self.allgather_object(thing)[root]

    def allgather(self, x: Buffer, name: str) -> Buffer:
        parts = self.allgather_object(_array(x).copy())
        return _like(x, np.concatenate(parts))

    def allreduce(self, x: Buffer, name: str, op: str = "sum") -> Buffer:
        first, *others = self.allgather_object(_array(x).copy())
        total = first.copy()
        for other in others:
            _REDUCTIONS[op](total, other, out=total)
        return _like(x, total)

    def start_allreduce(self, x: Buffer, name: str, op: str = "sum") -> Handle:
        return CompletedHandle(self.allreduce(x, name, op))

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        found = self.allgather_object(_array(x).copy() if self.rank == root else None)[root]
        _array(x)[...] = found
        return x

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        self._ranks.queue(to, tag, self.rank).put(_array(x).copy())
        return CompletedHandle(x)

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        return _Receive(self._ranks, self._ranks.queue(self.rank, tag, source), x)


class _Receive:
    def __init__(self, ranks: ThreadRanks, queue: SimpleQueue[Any], x: Buffer) -> None:
        self._ranks = ranks
        self._queue = queue
        self._x = x

    def wait(self) -> Buffer:
        _array(self._x)[...] = self._ranks.get(self._queue)
        return self._x


def run_threads(ranks: Sequence[ThreadRanks], works: Sequence[Callable[[], T]]) -> list[T]:
    """Runs each work on its own thread and returns the results. ranks: the shared state of the
    threads. Raises the first error, which ends the others."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except threading.BrokenBarrierError:
            pass  # another one has failed
        except BaseException as error:
            errors.append(error)
            for group in ranks:
                group.barrier.abort()

    threads = [
        threading.Thread(target=run, args=(number,), name=f"rank {number}", daemon=True)
        for number in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(works))]


def _array(x: Buffer) -> np.ndarray:
    """Returns a view."""
    return x.detach().numpy() if hasattr(x, "detach") else x


def _like(x: Buffer, array: np.ndarray) -> Buffer:
    """Returns the array, as a tensor if x is one."""
    if not hasattr(x, "new_empty"):
        return array
    tensor = x.new_empty(array.shape)
    _array(tensor)[...] = array
    return tensor

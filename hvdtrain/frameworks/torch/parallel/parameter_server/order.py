"""Order: which worker makes which step, when it may fetch weights, and when its gradient may be applied: the bound of staleness."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.core.updates import Outstanding, WorkerUpdate


class Window(NamedTuple):
    """Tickets first ... behind - 1, between two sync points, and what is done of them."""

    first: int
    behind: int
    updates: Sequence[WorkerUpdate]  # in their order
    reads: dict[int, Outstanding]  # worker -> what it has read for

    def left(self) -> list[int]:
        """The tickets that nobody has."""
        taken = {update.ticket for update in self.updates} | {read.ticket for read in self.reads.values()}
        return [ticket for ticket in range(self.first, self.behind) if ticket not in taken]


class Order:
    """The decisions of the first server, between two sync points; nothing here communicates.

    A worker has at most one read: weights that it fetched, by the number of updates that they have, and whose gradient is not applied yet.
    The staleness of an update is the number of updates between read and update. With a bound s it stays at most s, whatever the speed of
    the workers, because the reads can always be updated from one after the other, the oldest first: the i-th oldest (from 0) then is
    version - read + i updates old. What would break that waits: a gradient until an older read is updated from, and a worker that wants to
    read while s + 1 others have. A gradient of the oldest read never waits, so there is always one that may be applied.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self.version = 0  # updates done
        self._window = Window(0, 0, [], {})
        self._updates: list[WorkerUpdate] = []  # since the sync point
        self._left: deque[int] = deque()  # tickets
        self._granted: dict[int, int] = {}  # worker -> its next ticket, for which it has not read yet
        self._waiting: list[int] = []  # of these workers those that have no other read, the first to come first
        self._tickets: dict[int, int] = {}  # worker -> the ticket that it has read for
        self._reads: dict[int, int] = {}
        self._arrived: list[int] = []  # workers whose gradient is complete, the first to come first

    def begin(self, window: Window) -> None:
        """Its tickets that are left are to be given; all before it are done."""
        assert not self._reads and not self._waiting, (self._reads, self._waiting)
        self._window, self._updates = window, list(window.updates)
        self.version = window.first + len(self._updates)
        self._left = deque(window.left())
        self._tickets = {worker: read.ticket for worker, read in window.reads.items()}
        self._reads = {worker: read.read for worker, read in window.reads.items()}

    def window(self, version: int) -> Window:
        """The window after so many updates: later ones are not made, and their gradients are outstanding."""
        made = version - self._window.first
        reads = {worker: Outstanding(self._tickets[worker], read) for worker, read in self._reads.items()}
        for number, update in enumerate(self._updates[made:], start=version):
            reads[update.worker] = Outstanding(update.ticket, number - update.staleness)
        return self._window._replace(updates=self._updates[:made], reads=reads)

    def read_updates(self) -> list[WorkerUpdate]:
        """The updates of the window, at its end."""
        updates, self._updates = self._updates, []
        return updates

    def grant(self, worker: int) -> int | None:
        """The worker's next ticket; None where none is left before the sync point."""
        if not self._left:
            return None
        ticket = self._granted[worker] = self._left.popleft()
        if worker not in self._reads:
            self._waiting.append(worker)
        return ticket

    def readers(self) -> list[int]:
        """The workers that get the weights as they are now."""
        room = len(self._waiting) if self._bound is None else self._bound + 1 - len(self._reads)
        readers, self._waiting = self._waiting[:room], self._waiting[room:]
        for worker in readers:
            self._reads[worker] = self.version
            self._tickets[worker] = self._granted.pop(worker)
        return readers

    def arrive(self, worker: int) -> None:
        """The worker's gradient is complete."""
        self._arrived.append(worker)

    def next_update(self) -> WorkerUpdate | None:
        """The next update, from the first gradient that may be applied; None where none may be before another one arrives."""
        worker = next((worker for worker in self._arrived if self._may_be_applied(worker)), None)
        if worker is None:
            return None
        self._arrived.remove(worker)
        update = WorkerUpdate(self._tickets.pop(worker), self.version - self._reads.pop(worker), worker)
        self._updates.append(update)
        self.version += 1
        if worker in self._granted:
            self._waiting.append(worker)
        return update

    def _may_be_applied(self, worker: int) -> bool:
        if self._bound is None:
            return True
        others = sorted(read for other, read in self._reads.items() if other != worker)
        return all(self.version + 1 - read + i <= self._bound for i, read in enumerate(others))

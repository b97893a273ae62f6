"""Order: which worker makes which step, when it may fetch weights, and when its gradient may be applied: the bound of staleness."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.updates import Update


class Order:
    """The decisions of the first server, between two sync points; nothing here communicates.

    A worker has at most one read: weights that it fetched, by the number of updates that they have, and whose gradient is not applied yet.
    The staleness of an update is the number of updates between read and update. With a bound s it stays at most s, whatever the speed of
    the workers, because the reads can always be updated from one after the other, the oldest first: the i-th oldest (from 0) then is
    version - read + i updates old. What would break that waits: a gradient until an older read is updated from, and a worker that wants to
    read while s + 1 others have. A gradient of the oldest read never waits, so there is always one that may be applied.
    """

    def __init__(self, workers: Sequence[int], bound: int | None) -> None:
        self.workers, self._bound = workers, bound
        self.version = 0  # updates done
        self._next = self._behind = 0  # tickets that are left
        self._granted: dict[int, int] = {}  # worker -> its next ticket, for which it has not read yet
        self._waiting: list[int] = []  # of these workers those that have no other read, the first to come first
        self._tickets: dict[int, int] = {}  # worker -> the ticket that it has read for
        self._reads: dict[int, int] = {}
        self._arrived: list[int] = []  # workers whose gradient is complete, the first to come first

    def begin(self, first: int, behind: int) -> None:
        """Tickets first ... behind - 1 are to be given; all before are done."""
        assert not self._reads and not self._waiting, (self._reads, self._waiting)
        self.version = self._next = first
        self._behind = behind

    def grant(self, worker: int) -> int | None:
        """The worker's next ticket; None where none is left before the sync point."""
        if self._next == self._behind:
            return None
        ticket, self._next = self._next, self._next + 1
        self._granted[worker] = ticket
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

    def next_update(self) -> Update | None:
        """The next update, from the first gradient that may be applied; None where none may be before another one arrives."""
        worker = next((worker for worker in self._arrived if self._may_be_applied(worker)), None)
        if worker is None:
            return None
        self._arrived.remove(worker)
        update = Update(self._tickets.pop(worker), self.version - self._reads.pop(worker), worker)
        self.version += 1
        if worker in self._granted:
            self._waiting.append(worker)
        return update

    def _may_be_applied(self, worker: int) -> bool:
        if self._bound is None:
            return True
        others = sorted(read for other, read in self._reads.items() if other != worker)
        return all(self.version + 1 - read + i <= self._bound for i, read in enumerate(others))

"""Turns: which workers get weights before an update, and whose gradients it uses, with the messages
and the bound of staleness."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from hvdtrain.comm.communicator import Handle, PointToPoint
from hvdtrain.core.progress import GoOn, Outstanding, WorkerUpdate

LEADER = 0  # the rank of the first server
TICKET, DONE, DECISION, GRADIENT, WEIGHTS = range(1, 6)  # tags of messages
NO_TICKET = -1  # no ticket is left before the sync point


class Read(NamedTuple):
    """A worker's fetch of this server's weights."""

    worker: int  # its rank
    weights: torch.Tensor
    version: int  # updates that they have


class Turns(Protocol):
    """Turns of one server; all servers get the same answers, in the same order."""

    def begin(self, first: int, behind: int) -> None:
        """Begins updates first ... behind - 1, which are followed by a sync point."""

    def readers(self, own: torch.Tensor, version: int) -> Sequence[Read]:
        """Returns the workers that get weights now; `own` are the weights after `version`
        updates."""

    def chosen(self) -> Sequence[int]:
        """Waits for the gradients of the next update and returns their workers."""

    def read_updates(self) -> list[WorkerUpdate]:
        """Returns the updates since the last call, as far as this server knows them."""

    def cut_off(self) -> None:
        """Called after ranks died; ends pending messages."""


@runtime_checkable
class AsynchronousTurns(Turns, Protocol):
    """Turns with servers.bound=s, or without a bound."""

    def outstanding(self, version: int) -> dict[int, Outstanding]:
        """Returns the outstanding gradients of each worker after `version` updates; only on the
        first server."""

    def go_on(self, how: GoOn, workers: Sequence[int], *, is_begun: bool) -> None:
        """Continues after the loss of a worker; is_begun: between the same two sync points."""


class AllWorkers:
    """servers.bound=0: every update uses a gradient of each worker."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = workers

    def begin(self, first: int, behind: int) -> None:
        pass

    def readers(self, own: torch.Tensor, version: int) -> Sequence[Read]:
        return [Read(worker, own, version) for worker in self._workers]

    def chosen(self) -> Sequence[int]:
        return self._workers

    def read_updates(self) -> list[WorkerUpdate]:
        return []

    def cut_off(self) -> None:
        pass


class Leader:
    """The first server. It assigns tickets, and decides for all servers in which order gradients
    are applied."""

    def __init__(
        self, world: PointToPoint, servers: int, workers: Sequence[int], bound: int | None
    ) -> None:
        self._world = world
        self._followers = range(1, servers)
        self._workers = workers
        self._bound = bound
        self._order = UpdateOrder(bound)
        self._sent: dict[tuple[int, int], Handle] = {}  # (rank, tag) -> the last message
        self._goes_on = False  # in the window that the order has
        # workers that get their next ticket when their gradient is complete, again
        self._sending_again: set[int] = set()

    def begin(self, first: int, behind: int) -> None:
        if not self._goes_on:
            self._order.begin(TicketWindow(first, behind, [], {}))
        for worker in self._workers:
            if worker not in self._sending_again:
                self._grant(worker)
        self._goes_on = False
        self._sending_again = set()

    def readers(self, own: torch.Tensor, version: int) -> Sequence[Read]:
        readers = self._order.readers()
        self._decide(readers)
        return [Read(worker, own, version) for worker in readers]

    def chosen(self) -> Sequence[int]:
        while (update := self._order.next_update()) is None:
            worker = self._world.recv_from_any(np.empty(1, np.int64), "done", DONE)
            self._order.arrive(worker)
            self._grant(worker)
        self._decide([update.worker])
        return [update.worker]

    def read_updates(self) -> list[WorkerUpdate]:
        return self._order.read_updates()

    def outstanding(self, version: int) -> dict[int, Outstanding]:
        return self._order.window(version).reads

    def go_on(self, how: GoOn, workers: Sequence[int], *, is_begun: bool) -> None:
        former = self._order
        self._order = UpdateOrder(self._bound)
        self._workers = workers
        self._sent = {}
        self._goes_on = is_begun
        if is_begun:
            self._sending_again = set(how.sent_again)
            self._order.begin(former.window(how.version)._replace(reads=how.sent_again))

    def cut_off(self) -> None:
        end_all(self._sent.values())

    def _grant(self, worker: int) -> None:
        """Grants the worker its next ticket early, so that it reads samples while its gradient
        waits to be applied."""
        ticket = self._order.grant(worker)
        self._send(worker, TICKET, np.array([NO_TICKET if ticket is None else ticket]))

    def _decide(self, workers: Sequence[int]) -> None:
        message = np.full(1 + len(self._workers), len(workers))
        message[1 : 1 + len(workers)] = workers
        for server in self._followers:
            self._send(server, DECISION, message)

    def _send(self, rank: int, tag: int, message: np.ndarray) -> None:
        if (rank, tag) in self._sent:
            self._sent[rank, tag].wait()
        self._sent[rank, tag] = self._world.start_send(message, rank, "decision", tag)


class Follower:
    """Another server, which follows the decisions of the first one."""

    def __init__(self, world: PointToPoint, workers: Sequence[int]) -> None:
        self._world = world
        self._message = np.empty(1 + len(workers), np.int64)
        self._receiving: Handle | None = None

    def begin(self, first: int, behind: int) -> None:
        pass

    def readers(self, own: torch.Tensor, version: int) -> Sequence[Read]:
        return [Read(worker, own, version) for worker in self._decision()]

    def chosen(self) -> Sequence[int]:
        return self._decision()

    def read_updates(self) -> list[WorkerUpdate]:
        return []

    def cut_off(self) -> None:
        end_all([self._receiving] if self._receiving else [])

    def outstanding(self, version: int) -> dict[int, Outstanding]:
        return {}

    def go_on(self, how: GoOn, workers: Sequence[int], *, is_begun: bool) -> None:
        self._message = np.empty(1 + len(workers), np.int64)
        self._receiving = None

    def _decision(self) -> list[int]:
        self._receiving = self._world.start_recv(self._message, LEADER, "decision", DECISION)
        self._receiving.wait()
        return self._message[1 : 1 + self._message[0]].tolist()


class TicketWindow(NamedTuple):
    """The progress of tickets first ... behind - 1, which lie between two sync points."""

    first: int
    behind: int
    updates: Sequence[WorkerUpdate]  # in their order
    reads: dict[int, Outstanding]  # worker -> the read of its outstanding gradient

    def left(self) -> list[int]:
        """Returns the unassigned tickets."""
        taken = {update.ticket for update in self.updates} | {
            read.ticket for read in self.reads.values()
        }
        return [ticket for ticket in range(self.first, self.behind) if ticket not in taken]


class UpdateOrder:
    """The decisions of the first server, between two sync points; nothing here communicates.

    A worker has at most one read: a version of the weights that it fetched and whose gradient is
    not applied yet. The staleness of an update is the number of updates between read and update.
    With a bound s it is at most s, whatever the speed of the workers, because the reads can always
    be applied one after the other, the oldest first. Then the i-th oldest (from 0) is version -
    read + i updates old. Anything that would break that must wait: a gradient waits until an older
    read is applied, and a worker waits to read while s + 1 others have reads. A gradient of the
    oldest read never waits, so there is always one that may be applied.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self.version = 0  # updates done
        self._window = TicketWindow(0, 0, [], {})
        self._updates: list[WorkerUpdate] = []  # since the sync point
        self._left: deque[int] = deque()  # tickets
        self._granted: dict[int, int] = {}  # worker -> its next ticket, not read for yet
        self._waiting: list[int] = []  # these workers without another read, in order of arrival
        self._tickets: dict[int, int] = {}  # worker -> the ticket that it has read for
        self._reads: dict[int, int] = {}
        self._arrived: list[int] = []  # workers whose gradient is complete, in order of arrival

    def begin(self, window: TicketWindow) -> None:
        """Begins a window; its remaining tickets will be assigned, and all earlier ones are
        done."""
        assert not self._reads and not self._waiting, (self._reads, self._waiting)
        self._window = window
        self._updates = list(window.updates)
        self.version = window.first + len(self._updates)
        self._left = deque(window.left())
        self._tickets = {worker: read.ticket for worker, read in window.reads.items()}
        self._reads = {worker: read.read for worker, read in window.reads.items()}

    def window(self, version: int) -> TicketWindow:
        """Returns the window after `version` updates; later updates are not made, and their
        gradients are outstanding."""
        made = version - self._window.first
        reads = {
            worker: Outstanding(self._tickets[worker], read) for worker, read in self._reads.items()
        }
        for number, update in enumerate(self._updates[made:], start=version):
            reads[update.worker] = Outstanding(update.ticket, number - update.staleness)
        return self._window._replace(updates=self._updates[:made], reads=reads)

    def read_updates(self) -> list[WorkerUpdate]:
        """Returns the updates of the window, at its end."""
        updates = self._updates
        self._updates = []
        return updates

    def grant(self, worker: int) -> int | None:
        """Returns the worker's next ticket; None if no ticket is left before the sync point."""
        if not self._left:
            return None
        ticket = self._granted[worker] = self._left.popleft()
        if worker not in self._reads:
            self._waiting.append(worker)
        return ticket

    def readers(self) -> list[int]:
        """Returns the workers that get the current weights."""
        room = len(self._waiting) if self._bound is None else self._bound + 1 - len(self._reads)
        readers = self._waiting[:room]
        self._waiting = self._waiting[room:]
        for worker in readers:
            self._reads[worker] = self.version
            self._tickets[worker] = self._granted.pop(worker)
        return readers

    def arrive(self, worker: int) -> None:
        """Records that the worker's gradient is complete."""
        self._arrived.append(worker)

    def next_update(self) -> WorkerUpdate | None:
        """Returns the next update, from the first gradient that may be applied; None if none may be
        applied before another one arrives."""
        worker = next((worker for worker in self._arrived if self._may_be_applied(worker)), None)
        if worker is None:
            return None
        self._arrived.remove(worker)
        update = WorkerUpdate(
            self._tickets.pop(worker), self.version - self._reads.pop(worker), worker
        )
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


def end_all(handles: Iterable[Handle]) -> None:
    """Waits for messages after the engine has cancelled the ones that will never arrive, so that
    their memory can be freed."""
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.wait()

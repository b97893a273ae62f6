"""Turns: which workers get weights before an update, and whose gradients it is made from; what servers and workers tell each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from hvdtrain.comm.communicator import Handle, PointToPoint
from hvdtrain.core.updates import GoOn, Outstanding, WorkerUpdate
from hvdtrain.frameworks.torch.parallel.parameter_server.order import Order, Window

LEADER = 0  # the rank of the first server
TICKET, DONE, DECISION, GRADIENT, WEIGHTS = range(1, 6)  # tags of messages
NO_TICKET = -1  # none is left before the sync point


class Read(NamedTuple):
    """The weights of this server that a worker gets."""

    worker: int  # its rank
    weights: torch.Tensor
    version: int  # updates that they have


def end_all(handles: Iterable[Handle]) -> None:
    """Waits for messages of which the engine has ended those that do not come: their memory is free then."""
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.wait()


class Turns(Protocol):
    """Turns of one server; all servers get the same answers, in the same order."""

    def begin(self, first: int, behind: int) -> None:
        """Updates first ... behind - 1 come next; a sync point is behind them."""

    def readers(self, own: torch.Tensor, version: int) -> Sequence[Read]:
        """The workers that get weights now, which are `own` after `version` updates."""

    def chosen(self) -> Sequence[int]:
        """The workers from whose gradients the next update is made; waits for them."""

    def read_updates(self) -> list[WorkerUpdate]:
        """Since it was last called, what is known here."""

    def cut_off(self) -> None:
        """After ranks were lost: ends the messages that are under way."""


@runtime_checkable
class AsynchronousTurns(Turns, Protocol):
    """With servers.bound=s or none."""

    def outstanding(self, version: int) -> dict[int, Outstanding]:
        """After so many updates, of each worker that has some; on the first server alone."""

    def go_on(self, how: GoOn, workers: Sequence[int], *, is_begun: bool) -> None:
        """After a worker was lost, with these; is_begun: between the same two sync points."""


class AllWorkers:
    """servers.bound=0: every update is made from a gradient of each worker."""

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
    """The first server, which gives out tickets, and decides for all servers in which order gradients are applied."""

    def __init__(self, world: PointToPoint, servers: int, workers: Sequence[int], bound: int | None) -> None:
        self._world, self._followers, self._workers = world, range(1, servers), workers
        self._bound, self._order = bound, Order(bound)
        self._sent: dict[tuple[int, int], Handle] = {}  # (rank, tag) -> the last message
        self._goes_on = False  # in the window that the order has
        self._sending_again: set[int] = set()  # workers that get their next ticket when their gradient is complete, again

    def begin(self, first: int, behind: int) -> None:
        if not self._goes_on:
            self._order.begin(Window(first, behind, [], {}))
        for worker in self._workers:
            if worker not in self._sending_again:
                self._grant(worker)
        self._goes_on, self._sending_again = False, set()

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
        former, self._order = self._order, Order(self._bound)
        self._workers, self._sent, self._goes_on = workers, {}, is_begun
        if is_begun:
            self._sending_again = set(how.sent_again)
            self._order.begin(former.window(how.version)._replace(reads=how.sent_again))

    def cut_off(self) -> None:
        end_all(self._sent.values())

    def _grant(self, worker: int) -> None:
        """Already now, so that the worker reads the samples while its gradient waits to be applied."""
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
    """Another server, which does what the first one decides."""

    def __init__(self, world: PointToPoint, workers: Sequence[int]) -> None:
        self._world, self._message = world, np.empty(1 + len(workers), np.int64)
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
        self._message, self._receiving = np.empty(1 + len(workers), np.int64), None

    def _decision(self) -> list[int]:
        self._receiving = self._world.start_recv(self._message, LEADER, "decision", DECISION)
        self._receiving.wait()
        return self._message[1 : 1 + self._message[0]].tolist()

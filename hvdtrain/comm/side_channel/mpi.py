"""Gathers one message of each rank on rank 0 by point-to-point MPI, while main threads hang in collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

POLL_S = 0.02
# Tags on COMM_WORLD, or a copy of what is left of it, which nothing else uses: Horovod and the mpi engine have communicators of their own.
REQUEST, REPLY, ACKNOWLEDGMENT = 29101, 29102, 29103


class Gather(NamedTuple):
    """One call of gather(); a later call ends it."""

    number: int
    end_s: float  # of time.monotonic()


class MpiSideChannel:
    """Rank 0 sends requests, the others reply, in the threads that call gather(). Nothing is sent, posted or polled outside of it.

    A rank may find the request of a gather that rank 0 has given up. So each request has a number, rank 0 takes only replies to its
    latest one, and a rank replies to every request that it finds until one reply is acknowledged.
    """

    def __init__(self, mpi: Any, world: Any) -> None:
        """`mpi`: the module mpi4py.MPI; world: the MPI communicator of all ranks."""
        self._mpi, self._world = mpi, world
        self._sends: list[Any] = []  # pending requests of MPI, kept for the memory that they use; some never complete
        self._receives: dict[int, list[tuple[int, Any]]] = {REQUEST: [], REPLY: [], ACKNOWLEDGMENT: []}  # tag -> (rank, pending request)
        self._latest = 0  # number of the latest gather

    def gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Gathers messages, see Communicator.side_channel_gather."""
        mpi = self._mpi
        if not mpi.Is_initialized() or mpi.Is_finalized() or mpi.Query_thread() != mpi.THREAD_MULTIPLE:
            return None
        gather = Gather(time.monotonic_ns(), time.monotonic() + wait_s)
        self._latest = gather.number
        return self._collect(message, gather) if self._world.rank == 0 else self._reply(message, gather)

    def _collect(self, message: str, gather: Gather) -> list[str | None]:
        """Rank 0's part: the messages of all ranks, None for those whose reply has not come in time."""
        pending = set(range(1, self._world.size))
        messages: list[str | None] = [message, *[None] * len(pending)]
        for rank in sorted(pending):
            self._send(gather.number, rank, REQUEST)
        while pending and self._goes_on(gather):
            for rank, (number, reply) in self._received(REPLY):
                if number == gather.number:
                    messages[rank] = reply
                    pending.discard(rank)
                    self._send(number, rank, ACKNOWLEDGMENT)
        return messages

    def _reply(self, message: str, gather: Gather) -> list[str | None]:
        """The other ranks' part: returns when a reply is acknowledged, or the time is over."""
        replied: set[int] = set()
        while self._goes_on(gather) and not replied & {number for _, number in self._received(ACKNOWLEDGMENT)}:
            for _, number in self._received(REQUEST):
                self._send((number, message), 0, REPLY)
                replied.add(number)
        return []

    def _goes_on(self, gather: Gather) -> bool:
        """Sleeps briefly. False when the time is over, a later gather has begun, or MPI is finalized."""
        time.sleep(POLL_S)
        if self._mpi.Is_finalized() or self._latest != gather.number:
            return False
        self._sends = [request for request in self._sends if not request.Test()]
        return time.monotonic() < gather.end_s

    def _send(self, content: Any, rank: int, tag: int) -> None:
        self._sends.append(self._world.isend(content, rank, tag))

    def _received(self, tag: int) -> Iterator[tuple[int, Any]]:
        """(rank, content) of the messages that have arrived whole. A large one stays pending where its sender has stopped meanwhile."""
        status = self._mpi.Status()
        receives = self._receives[tag]
        while message := self._world.improbe(tag=tag, status=status):
            receives.append((status.source, message.irecv()))
        for receive in receives[:]:
            rank, request = receive
            complete, content = request.test()
            if complete:
                receives.remove(receive)
                yield rank, content

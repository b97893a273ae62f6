"""One text of each rank brought to rank 0 while main threads hang in collectives: MPI messages that nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

POLL_S = 0.02
# Our tags on COMM_WORLD; collectives of Horovod and of the mpi engine use communicators of their own.
QUESTION, ANSWER, THANKS = 29101, 29102, 29103


class Turn(NamedTuple):
    """One call of gather(); a later call ends it."""

    number: int
    end_s: float


class MpiSideChannel:
    """Rank 0 asks, the others answer, in the threads that call gather(). Nothing is sent, posted or polled before that.

    A question has a number, and its answer is thanked for: a rank may find a question of a stall that passed. To answer that one is
    not enough, and the answer must not be taken for one to the question of today.
    """

    def __init__(self, mpi: Any) -> None:
        """Of mpi4py.MPI."""
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self._sends: list[Any] = []  # under way; they need their memory until they are over, which may be never
        self._receives: dict[int, list[tuple[int, Any]]] = {QUESTION: [], ANSWER: [], THANKS: []}  # (rank, request), the same
        self._newest = 0

    def gather(self, text: str, wait_s: float) -> list[str | None] | None:
        """As Communicator.side_channel_gather."""
        mpi = self._mpi
        if not mpi.Is_initialized() or mpi.Is_finalized() or mpi.Query_thread() != mpi.THREAD_MULTIPLE:
            return None
        turn = Turn(time.monotonic_ns(), time.monotonic() + wait_s)
        self._newest = turn.number
        return self._ask(text, turn) if self._world.rank == 0 else self._answer(text, turn)

    def _ask(self, text: str, turn: Turn) -> list[str | None]:
        others = set(range(1, self._world.size))
        texts: list[str | None] = [text, *[None] * len(others)]
        for rank in sorted(others):
            self._send(turn.number, rank, QUESTION)
        while others and self._goes_on(turn):
            for rank, (number, theirs) in self._arrived(ANSWER):
                if number == turn.number:
                    texts[rank] = theirs
                    others.discard(rank)
                    self._send(number, rank, THANKS)
        return texts

    def _answer(self, text: str, turn: Turn) -> list[str | None]:
        answered: set[int] = set()
        while self._goes_on(turn) and not answered & {number for _, number in self._arrived(THANKS)}:
            for _, number in self._arrived(QUESTION):
                self._send((number, text), 0, ANSWER)
                answered.add(number)
        return []

    def _goes_on(self, turn: Turn) -> bool:
        """After a short sleep; False when the time is over, or MPI is."""
        time.sleep(POLL_S)
        if self._mpi.Is_finalized() or self._newest != turn.number:
            return False
        self._sends = [request for request in self._sends if not request.Test()]
        return time.monotonic() < turn.end_s

    def _send(self, thing: Any, rank: int, tag: int) -> None:
        self._sends.append(self._world.isend(thing, rank, tag))

    def _arrived(self, tag: int) -> Iterator[tuple[int, Any]]:
        """(rank, thing) of what has come. A large one may stay under way, where its sender has stopped meanwhile."""
        status = self._mpi.Status()
        receives = self._receives[tag]
        while message := self._world.improbe(tag=tag, status=status):
            receives.append((status.source, message.irecv()))
        for receive in receives[:]:
            over, thing = receive[1].test()
            if over:
                receives.remove(receive)
                yield receive[0], thing

"""Ranks that are threads of this process, for tests of strategies: no MPI to start, and sums by
numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from hvdtrain.comm.communicator import Buffer, CompletedHandle, Handle, part_of
from hvdtrain.comm.threads import ThreadCommunicator, ThreadRanks, run_threads

T = TypeVar("T")
LIMIT_S = 120.0  # limit for the ranks to meet; reached only if a rank does not come


class ThreadRank(ThreadCommunicator):
    """One of the ranks, with the collectives of strategies that cut something over ranks."""

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        return CompletedHandle(self.broadcast(x, name, root))

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        total = self.allreduce(x, name)
        return CompletedHandle(total if self.rank == root else x)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(self.allreduce(x, name)[part_of(len(x), self.rank, self.size)])

    def start_spread(self, x: Buffer, name: str) -> Handle:
        return CompletedHandle(self.allgather(x[part_of(len(x), self.rank, self.size)], name))


class Counting(ThreadRank):
    """Counts the bytes that this rank sends to all others."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(ranks, rank)
        self.sent = 0

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self.sent += x.nbytes * (root == self.rank)
        return super().broadcast(x, name, root)


def in_threads(size: int, of_rank: Callable[[ThreadRank], T]) -> list[T]:
    """What of_rank(communicator) returns on each of `size` ranks. Raises the first error of any."""
    ranks = ThreadRanks(size)
    ranks.barrier = threading.Barrier(size, timeout=LIMIT_S)
    return run_threads(
        [ranks], [lambda rank=rank: of_rank(ThreadRank(ranks, rank)) for rank in range(size)]
    )  # type: ignore[misc]

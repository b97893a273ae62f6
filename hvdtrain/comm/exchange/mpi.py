"""The exchange of the mpi engine: MPI_Iallgather, 2 microseconds on one host; announcements are messages, which need no receiver."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

NOTICE, LAST = 1, 2  # tags of the messages


class MpiExchange:
    """Of an MPI communicator that nothing else uses."""

    def __init__(self, mpi: Any, ranks: Any) -> None:
        self._mpi, self._comm, self._notices = mpi, ranks, ranks.Dup()
        self.threads = bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
        self._request, self._number = None, 0
        self._sent: list[Any] = []  # requests of announcements, with the memory that they use
        self._seen: dict[int, int] = {}  # rank -> the last exchange that it announced

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number += 1
        self._request = self._comm.Iallgather(block, rows)

    def done(self) -> bool:
        assert self._request is not None, "nothing was started"
        return bool(self._request.Test())

    def announce(self) -> None:
        self.present()  # takes what others have sent, which would wait in MPI's memory
        self._sent = [(number, request) for number, request in self._sent if not request.Test()]
        number = np.array([self._number])
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._sent += [(number, self._notices.Isend(number, rank, NOTICE)) for rank in others]
        self._seen[self._comm.rank] = self._number

    def present(self) -> set[int]:
        status, number = self._mpi.Status(), np.zeros(1, np.int64)
        while self._notices.Iprobe(self._mpi.ANY_SOURCE, NOTICE, status):
            self._notices.Recv(number, status.source, NOTICE)
            self._seen[status.source] = int(number[0])
        return {rank for rank, announced in self._seen.items() if announced >= self._number}

    def free(self) -> None:
        """A communicator lives until its last message has come: MPI may give its number to another one."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        number = np.zeros(1, np.int64)
        sends = [self._notices.Isend(number, rank, LAST) for rank in others]
        for rank in others:
            self._notices.Recv(number, rank, LAST)  # behind the announcements of this rank
        self.present()
        self._mpi.Request.Waitall([*sends, *(request for _, request in self._sent)])
        self._sent = []
        self._comm.Free()
        self._notices.Free()

    def revoke(self) -> None:
        """What ranks wait for in it fails on every one."""
        with contextlib.suppress(self._mpi.Exception):
            self._comm.Revoke()

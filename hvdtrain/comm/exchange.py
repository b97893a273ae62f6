"""A small block of every rank on all ranks, without waiting: how ranks find out what the others are about to do, and who does not come."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, Protocol, get_args

import numpy as np

Word = Literal["here", "taken", "given up"]  # of a rank about an exchange: it waits there; it has taken the result; it never will
WORDS: tuple[Word, ...] = get_args(Word)
NOTICE, LAST = 1, 2  # tags of messages of MPI


class Exchange(Protocol):
    """Gathers, one after another: each rank starts the next one once the last is done."""

    threads: bool  # whether threads of a process may use their communicators at the same time

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        """block: of the same length and dtype on every rank, unchanged until done(); rows: takes the blocks in rank order."""

    def done(self) -> bool:
        """Whether every rank has started it. Raises what a collective raises where a rank is lost."""

    def say(self, word: Word) -> None:
        """Tells the other ranks, of the exchange that this one has started last. They need not be in it."""

    def said(self) -> dict[Word, set[int]]:
        """The ranks that have said each word of this exchange."""

    def free(self) -> None:
        """Every rank calls it once, last, when no exchange is under way. A collective."""


class Alone:
    """The exchange of one rank: nothing to wait for."""

    threads = True

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        rows[0] = block

    def done(self) -> bool:
        return True

    def say(self, word: Word) -> None:
        pass

    def said(self) -> dict[Word, set[int]]:
        return {word: set() for word in WORDS}

    def free(self) -> None:
        pass


class MpiExchange:
    """An exchange over an MPI communicator that nothing else uses: MPI_Iallgather, 2 microseconds on one host; messages for words."""

    def __init__(self, mpi: Any, ranks: Any) -> None:
        self._mpi, self._comm, self._notices = mpi, ranks, ranks.Dup()
        self.threads = bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
        self._request, self._number = None, 0
        self._sent: list[Any] = []  # requests of notices, with the memory that they use
        self._said: dict[tuple[int, Word], int] = {}  # rank, word -> the last exchange that it said it of

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number += 1
        self._request = self._comm.Iallgather(block, rows)

    def done(self) -> bool:
        assert self._request is not None, "nothing was started"
        return bool(self._request.Test())

    def say(self, word: Word) -> None:
        self._receive()
        self._sent = [(notice, request) for notice, request in self._sent if not request.Test()]
        notice = np.array([self._number, WORDS.index(word)])
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._sent += [(notice, self._notices.Isend(notice, rank, NOTICE)) for rank in others]
        self._said[self._comm.rank, word] = self._number

    def said(self) -> dict[Word, set[int]]:
        self._receive()
        now = [pair for pair, number in self._said.items() if number == self._number]
        return {word: {rank for rank, other in now if other == word} for word in WORDS}

    def _receive(self) -> None:
        """Takes what others have sent, which would wait in MPI's memory."""
        status, notice = self._mpi.Status(), np.zeros(2, np.int64)
        while self._notices.Iprobe(self._mpi.ANY_SOURCE, NOTICE, status):
            self._notices.Recv(notice, status.source, NOTICE)
            self._said[status.source, WORDS[notice[1]]] = int(notice[0])

    def free(self) -> None:
        """A communicator lives until its last message has come: MPI may give its number to another one."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        number = np.zeros(1, np.int64)
        sends = [self._notices.Isend(number, rank, LAST) for rank in others]
        for rank in others:
            self._notices.Recv(number, rank, LAST)  # behind the notices of this rank
        self._receive()
        self._mpi.Request.Waitall([*sends, *(request for _, request in self._sent)])
        self._sent = []
        self._comm.Free()
        self._notices.Free()

    def revoke(self) -> None:
        """What ranks wait for in it fails on every one."""
        with contextlib.suppress(self._mpi.Exception):
            self._comm.Revoke()

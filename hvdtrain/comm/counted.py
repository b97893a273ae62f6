"""Counted: a communicator that notes what it is asked to move, around one that moves it, or around one of ranks that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from hvdtrain.comm.communicator import Buffer, Communicator, Handle, Op, part_of

Kind = Literal["allreduce", "broadcast", "reduce", "reduce-scatter", "all-gather", "message"]


class Moved(NamedTuple):
    """One collective, or one message that this rank sends."""

    kind: Kind
    name: str  # its lasting name
    ranks: tuple[int, ...]  # of the job, that take part; of a message the sender and the receiver
    size_bytes: int  # of what all of them have in the end, or sum
    sent_bytes: int  # that have to leave this rank where each byte goes straight to who needs it


def counted(communicator: Communicator, moved: list[Moved], ranks: Sequence[int] = ()) -> Communicator:
    """A communicator that appends to `moved` what it moves. ranks: of the job, in the order of this group; default: 0, 1, ..."""
    found: Any = _Counted(communicator, moved, tuple(ranks) or tuple(range(communicator.size)))
    return found


class _Counted:
    """What it does not count goes to the communicator inside: objects, the side channel, abort()."""

    def __init__(self, communicator: Any, moved: list[Moved], ranks: tuple[int, ...]) -> None:
        self._communicator, self._moved, self._ranks = communicator, moved, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def _add(self, kind: Kind, name: str, x: Buffer, sent_bytes: int) -> None:
        if self._communicator.size > 1:
            self._moved.append(Moved(kind, name, self._ranks, x.nbytes, sent_bytes))

    def _add_allreduce(self, name: str, x: Buffer) -> None:
        size = self._communicator.size
        self._add("allreduce", name, x, 2 * x.nbytes * (size - 1) // size)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        self._add_allreduce(name, x)
        return self._communicator.allreduce(x, name, op)

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        self._add_allreduce(name, x)
        found: Handle = self._communicator.start_allreduce(x, name, op)
        return found

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self._add("broadcast", name, x, self._from_root(x, root))
        return self._communicator.broadcast(x, name, root)

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        self._add("broadcast", name, x, self._from_root(x, root))
        found: Handle = self._communicator.start_broadcast(x, name, root)
        return found

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        self._add("reduce", name, x, x.nbytes * (self._communicator.rank != root))
        found: Handle = self._communicator.start_reduce(x, name, root)
        return found

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        self._add("reduce-scatter", name, x, x.nbytes - self._own(x).nbytes)
        return self._communicator.reduce_scatter(x, name)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        self._add("reduce-scatter", name, x, x.nbytes - self._own(x).nbytes)
        found: Handle = self._communicator.start_reduce_scatter(x, name)
        return found

    def start_spread(self, x: Buffer, name: str) -> Handle:
        self._add("all-gather", name, x, self._own(x).nbytes * (self._communicator.size - 1))
        found: Handle = self._communicator.start_spread(x, name)
        return found

    def allgather(self, x: Buffer, name: str) -> Buffer:
        found = self._communicator.allgather(x, name)
        self._add("all-gather", name, found, x.nbytes * (self._communicator.size - 1))
        return found

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        ends = self._ranks[self._communicator.rank], self._ranks[to]
        self._moved.append(Moved("message", name, ends, x.nbytes, x.nbytes))
        found: Handle = self._communicator.start_send(x, to, name, tag)
        return found

    def split(self, color: int | None) -> Communicator | None:
        own = self._communicator.split(color)
        return None if own is None else counted(own, self._moved)

    def _from_root(self, x: Buffer, root: int) -> int:
        return int(x.nbytes) * (self._communicator.size - 1) * (self._communicator.rank == root)

    def _own(self, x: Buffer) -> Buffer:
        return x[part_of(len(x), self._communicator.rank, self._communicator.size)]

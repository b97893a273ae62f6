"""Of the arrays that ranks have in parts: each rank keeps a copy of its own parts and of those of one other rank, its neighbour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator, point_to_point
from hvdtrain.comm.split import split_groups
from hvdtrain.core.pieces import Piece
from hvdtrain.frameworks.state import gather_one

_ALIGNMENT = 8  # of the copy of an array

Runs = list[tuple[int, int]]  # where elements lie in a whole array, as Piece.runs()


class Array(NamedTuple):
    """Of which each rank has a part."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Part(NamedTuple):
    """What one rank has of some arrays."""

    runs: list[Runs]  # of each array
    memory: np.ndarray  # bytes

    def views(self, arrays: Sequence[Array]) -> Iterator[np.ndarray]:
        """The numbers, of each array."""
        begin = 0
        for array, runs in zip(arrays, self.runs, strict=True):
            nbytes = _elements(runs) * np.dtype(array.dtype).itemsize
            yield self.memory[begin : begin + nbytes].view(array.dtype)
            begin += _aligned(nbytes)


class Copies(NamedTuple):
    """The parts that a rank keeps of one sync point."""

    number: int  # of the sync point
    ranks: int  # that had parts
    arrays: list[Array]
    parts: dict[int, Part]  # by the number that the rank had
    empty: frozenset[int] = frozenset()  # ranks of which there is nothing to keep, as workers of parameter servers


class Neighbours:
    """Who keeps whose parts: rank r those of r - distance, on another host where there are several."""

    def __init__(self, communicator: Communicator, pieces: Sequence[Piece]) -> None:
        """pieces: this rank's parts. A collective."""
        self.arrays = [Array(piece.name, piece.shape, piece.array.dtype.str) for piece in pieces]
        self._communicator, self._rank, self._size = communicator, communicator.rank, communicator.size
        self._memory: Copies | None = None
        away = distance(split_groups(communicator, 0).hosts)
        self._to, self._source = (self._rank + away) % self._size, (self._rank - away) % self._size
        of_all = communicator.allgather_object([list(piece.runs()) for piece in pieces])
        self._empty = frozenset(rank for rank, runs in enumerate(of_all) if not any(map(_elements, runs)))
        self._runs: dict[int, list[Runs]] = {rank: of_all[rank] for rank in (self._rank, self._source)}

    def have(self, pieces: Sequence[Piece]) -> bool:
        """Whether these are the arrays: a user's optimizer makes its state in its first step."""
        return [piece.name for piece in pieces] == [array.name for array in self.arrays]

    def exchange(self, pieces: Sequence[Piece], number: int, memory: Copies | None) -> Copies:
        """Copies of a sync point, in the memory of older ones. A collective."""
        if memory is None or memory.ranks != self._size or memory.arrays != self.arrays:
            parts = {rank: Part(runs, np.empty(_nbytes(self.arrays, runs), np.uint8)) for rank, runs in self._runs.items()}
            memory = Copies(number, self._size, self.arrays, parts, self._empty)
        own, kept = memory.parts[self._rank], memory.parts[self._source]
        for view, piece in zip(own.views(self.arrays), pieces, strict=True):
            np.copyto(view, piece.array)
        if kept is not own:
            self._memory = memory  # of messages that may still come where a rank is lost: it stays until there are other neighbours
            peers = point_to_point(self._communicator, "guard.lost")
            coming = peers.start_recv(kept.memory, self._source, "copy.parts")
            going = peers.start_send(own.memory, self._to, "copy.parts")
            coming.wait()
            going.wait()
        return memory._replace(number=number)


def distance(hosts: Sequence[int]) -> int:
    """Between a rank and the one that keeps its copy: the least with which most ranks have theirs on another host."""
    ranks = range(len(hosts))

    def apart(away: int) -> int:
        return sum(hosts[rank] != hosts[(rank + away) % len(hosts)] for rank in ranks)

    return max(ranks[1:], key=apart, default=0)


def wholes(communicator: Communicator, arrays: Sequence[Array], parts: Sequence[Part]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays, one by one, of which this rank gives these parts and others the rest. A collective."""
    of_ranks = communicator.allgather_object([[run for part in parts for run in part.runs[i]] for i in range(len(arrays))])
    views = [list(part.views(arrays)) for part in parts]
    for i, array in enumerate(arrays):
        own = np.concatenate([np.empty(0, array.dtype), *[of_part[i] for of_part in views]])
        yield array.name, gather_one(communicator, array.name, array.shape, own, [of_rank[i] for of_rank in of_ranks])


def _nbytes(arrays: Sequence[Array], runs: Sequence[Runs]) -> int:
    return sum(_aligned(_elements(of) * np.dtype(array.dtype).itemsize) for array, of in zip(arrays, runs, strict=True))


def _elements(runs: Runs) -> int:
    return sum(behind - first for first, behind in runs)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT

"""Copies of arrays that ranks have in parts: each rank keeps a copy of its own parts and of those of one other rank, its neighbour."""

from __future__ import annotations

import itertools
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
    """An array of which each rank has a part."""

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
        self.arrays = [Array(piece.name, piece.shape, piece.dtype.str) for piece in pieces]
        self._communicator, self._rank, self._size = communicator, communicator.rank, communicator.size
        self._messages: list[np.ndarray] = []  # under way
        away = distance(split_groups(communicator, 0).hosts)
        self._to, self._source = (self._rank + away) % self._size, (self._rank - away) % self._size
        own: list[Runs] = [list(piece.runs()) for piece in pieces]
        has_parts = communicator.allgather(np.array([any(map(_elements, own))], np.uint8), "copy.has_parts")
        self._empty = frozenset(np.flatnonzero(has_parts == 0).tolist())
        self._runs = {self._rank: own}  # and, from the first exchange on, those of the source

    def have(self, pieces: Sequence[Piece]) -> bool:
        """Whether these are the arrays: a user's optimizer makes its state in its first step."""
        return [piece.name for piece in pieces] == [array.name for array in self.arrays]

    def exchange(self, pieces: Sequence[Piece], number: int, memory: Copies | None) -> Copies:
        """Copies of a sync point, in the memory of older ones. A collective."""
        if self._source not in self._runs:
            self._runs[self._source] = self._runs_of_source()
        if memory is None or memory.ranks != self._size or memory.arrays != self.arrays:
            parts = {rank: Part(runs, np.empty(_nbytes(self.arrays, runs), np.uint8)) for rank, runs in self._runs.items()}
            memory = Copies(number, self._size, self.arrays, parts, self._empty)
        own, kept = memory.parts[self._rank], memory.parts[self._source]
        for view, piece in zip(own.views(self.arrays), pieces, strict=True):
            np.copyto(view, piece.read())
        if kept is not own:
            self._swap(own.memory, kept.memory, "copy.parts")
        return memory._replace(number=number)

    def _runs_of_source(self) -> list[Runs]:
        """A rank knows its own and its source's alone: those of all ranks would grow with the model and the number of ranks together."""
        own = self._runs[self._rank]
        counts = np.array([len(runs) for runs in own], np.int64)
        of_source = np.empty_like(counts)
        self._swap(counts, of_source, "copy.counts")
        ends = np.array([(0, 0), *(run for runs in own for run in runs)], np.int64)  # (0, 0): no message is empty
        ends_of_source = np.empty((1 + int(of_source.sum()), 2), np.int64)
        self._swap(ends, ends_of_source, "copy.runs")
        numbers = iter(ends_of_source[1:].tolist())
        return [[(first, behind) for first, behind in itertools.islice(numbers, count)] for count in of_source.tolist()]

    def _swap(self, own: np.ndarray, of_source: np.ndarray, name: str) -> None:
        """Gives `own` to the rank that keeps it, and takes what the source has."""
        self._messages += [own, of_source]  # where a rank is lost they may still come: they stay until there are other neighbours
        peers = point_to_point(self._communicator, "guard.lost")
        coming = peers.start_recv(of_source, self._source, name)
        going = peers.start_send(own, self._to, name)
        coming.wait()
        going.wait()
        del self._messages[-2:]


def distance(hosts: Sequence[int]) -> int:
    """Between a rank and the one that keeps its copy: the least with which most ranks have theirs on another host."""
    of_ranks = np.array(hosts)

    def apart(away: int) -> int:  # by numpy: 67 million pairs of 8,192 ranks
        return int(np.count_nonzero(of_ranks != np.roll(of_ranks, -away)))

    return max(range(1, len(hosts)), key=apart, default=0)


def wholes(communicator: Communicator, arrays: Sequence[Array], parts: Sequence[Part]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays, one by one, of which this rank gives these parts and others the rest. A collective."""
    views = [list(part.views(arrays)) for part in parts]
    for i, array in enumerate(arrays):
        own = np.concatenate([np.empty(0, array.dtype), *[of_part[i] for of_part in views]])
        of_ranks: list[Runs] = communicator.allgather_object([run for part in parts for run in part.runs[i]])  # of one array at a time
        yield array.name, gather_one(communicator, array.name, array.shape, own, of_ranks)


def _nbytes(arrays: Sequence[Array], runs: Sequence[Runs]) -> int:
    return sum(_aligned(_elements(of) * np.dtype(array.dtype).itemsize) for array, of in zip(arrays, runs, strict=True))


def _elements(runs: Runs) -> int:
    return sum(behind - first for first, behind in runs)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT

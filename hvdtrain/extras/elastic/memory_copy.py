"""Copies of the training state at the newest sync point, in the ranks' memory: surviving ranks
return to it after a loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator, Elastic, point_to_point
from hvdtrain.comm.mesh import split_groups
from hvdtrain.core.arrays import Arrays, ArrayStream, Piece, whole_arrays
from hvdtrain.frameworks.learner import Learner, gather_one
from hvdtrain.training.progress.train_state import TrainState


class Kept(NamedTuple):
    """The shards of one sync point that a rank keeps."""

    number: int
    ranks: int  # number of ranks that had parts
    owners: list[int]  # the ranks whose parts it keeps


class HeldState(NamedTuple):
    """The copies that a rank can return to."""

    number: int  # number of the sync point of its arrays
    evaluated: int  # see TrainState.evaluated
    parts: list[Kept]


class RolledBack(NamedTuple):
    """The restored state, the same on all ranks."""

    now: TrainState
    from_checkpoint: bool


class MemoryCopy:
    """Keeps a host copy of the training state on each rank. Replicated arrays are copied on every
    rank.

    For sharded arrays, each rank keeps its own and its neighbour's shards of two sync points, so
    that all ranks have the older shards when the newer ones begin to arrive. Replicated arrays are
    copied after that, so a rank that still waits has the older ones.
    """

    def __init__(self, learner: Learner, communicator: Elastic, now: TrainState) -> None:
        """A collective."""
        self._learner = learner
        self._communicator = communicator
        self._arrays: Arrays = {}
        self._parts: list[Copies] = []  # the newest last
        self._neighbours: Neighbours | None = None
        self._number = 0
        self.now = now
        self._copy(now, 0)

    def confirm(self) -> None:
        """Called before keep(). Fails if a rank died in earlier collectives. A collective."""
        self._communicator.confirm()

    def keep(self, now: TrainState) -> None:
        """Copies the state at a sync point. A collective if the state is sharded. Arrays are copied
        only after steps: an evaluation changes none."""
        if now.progress.step != self.now.progress.step:
            self._copy(now, self._number + 1)
        self.now = now

    def _copy(self, now: TrainState, number: int) -> None:
        pieces: Iterable[Piece] = self._learner.pieces()
        if self._learner.is_sharded:
            pieces = list(pieces)
            self._copy_parts([piece for piece in pieces if not piece.is_whole], number)
        self._copy_arrays(pieces)
        self._number = number
        self.now = now

    def _copy_parts(self, pieces: Sequence[Piece], number: int) -> None:
        if self._neighbours is None or not self._neighbours.have(pieces):
            self._neighbours = Neighbours(self._communicator, pieces)
        memory = self._parts.pop(0) if len(self._parts) == 2 else None
        self._parts.append(self._neighbours.exchange(pieces, number, memory))

    def _copy_arrays(self, pieces: Iterable[Piece]) -> None:
        for name, array in whole_arrays(pieces):
            kept = self._arrays.get(name)
            if kept is None:  # a user's optimizer creates its state in its first step
                self._arrays[name] = array.copy()
            else:
                np.copyto(kept, array)

    def go_on(self) -> TrainState:
        """Called after a loss that needs no restore: existing copies are kept until the next sync
        point."""
        self._neighbours = None
        return self.now

    def restore(self, fall_back: Callable[[], TrainState]) -> RolledBack:
        """Loads on all ranks the newest state that the surviving ranks together have completely. A
        collective.

        fall_back: loads an older state into every rank, if shards are gone. Some ranks may have
        passed a sync point at which others noticed the loss. If another rank is lost meanwhile,
        restore() is called again: all earlier copies are still there.
        """
        communicator = self._communicator
        learner = self._learner
        parts = [
            Kept(each.number, each.ranks, sorted({*each.parts, *each.empty}))
            for each in self._parts
        ]
        tables: list[HeldState] = communicator.allgather_object(
            HeldState(self._number, self.now.evaluated, parts)
        )
        number = newest(tables, learner.is_sharded)
        if learner.is_sharded:
            learner.divide_anew()
        if number is None:
            now = fall_back()
        else:
            now = self._load(tables, number)
            if self._number != number:
                self._copy_arrays(learner.pieces())
                self._number = number
                self.now = now
        self._parts = [each for each in self._parts if each.number == number]
        self._neighbours = None
        self._copy(now, 1 + max(held.number for held in tables))
        return RolledBack(now, number is None)

    def _load(self, tables: Sequence[HeldState], number: int) -> TrainState:
        """Loads the state of this sync point into the learner. A collective."""
        communicator = self._communicator
        rank = self._communicator.rank
        source = max(
            range(len(tables)),
            key=lambda each: (tables[each].number == number, tables[each].evaluated),
        )
        parts = next((each for each in self._parts if each.number == number), None)
        arrays = [Array(name, array.shape, array.dtype.str) for name, array in self._arrays.items()]
        own = (self.now, arrays, parts.arrays if parts else [])
        now: TrainState
        now, arrays, in_parts = communicator.broadcast_object(own, source)
        givers = {
            owner: holder
            for holder in reversed(range(len(tables)))
            for owner in _owners(tables[holder], number)
        }
        given = (
            [part for owner, part in parts.parts.items() if givers[owner] == rank] if parts else []
        )
        is_everywhere = all(held.number == number for held in tables)

        def stream() -> Iterator[tuple[str, np.ndarray]]:
            yield from self._arrays.items() if is_everywhere else self._from(source, arrays)
            yield from wholes(communicator, in_parts, given) if in_parts else ()

        self._learner.load(
            ArrayStream(
                {array.name: tuple(array.shape) for array in (*arrays, *in_parts)}, stream()
            )
        )
        return now

    def _from(self, source: int, arrays: Sequence[Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the arrays of one rank."""
        for name, shape, dtype in arrays:
            array = (
                self._arrays[name].copy()
                if self._communicator.rank == source
                else np.empty(shape, dtype)
            )
            yield name, self._communicator.broadcast(array, f"state.{name}", source)


def newest(tables: Sequence[HeldState], in_parts: bool) -> int | None:
    """Returns the number of the newest sync point that these ranks have completely; None if shards
    are lost."""
    for number in sorted({held.number for held in tables}, reverse=True):
        owners = {owner for held in tables for owner in _owners(held, number)}
        ranks = max(
            (kept.ranks for held in tables for kept in held.parts if kept.number == number),
            default=0,
        )
        if not in_parts or (ranks and len(owners) == ranks):
            return number
    return None


def _owners(held: HeldState, number: int) -> list[int]:
    return [owner for kept in held.parts if kept.number == number for owner in kept.owners]


_ALIGNMENT = 8  # alignment of the copy of an array
# runs of all ranks that a rank holds in memory; a run takes about 100 bytes, and an array usually
# has one run on a rank
RUNS_AT_ONCE = 2**17

Runs = list[tuple[int, int]]  # positions in the whole array, see Piece.runs()


class Array(NamedTuple):
    """A sharded array."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class RankRuns(NamedTuple):
    """One rank's parts of some arrays."""

    runs: list[Runs]  # runs of each array
    memory: np.ndarray  # bytes

    def arrays_of(self, arrays: Sequence[Array]) -> Iterator[np.ndarray]:
        """Returns views of the arrays."""
        begin = 0
        for array, runs in zip(arrays, self.runs, strict=True):
            nbytes = _elements(runs) * np.dtype(array.dtype).itemsize
            yield self.memory[begin : begin + nbytes].view(array.dtype)
            begin += _aligned(nbytes)


class Copies(NamedTuple):
    """The parts of one sync point that a rank keeps."""

    number: int  # number of the sync point
    ranks: int  # number of ranks that had parts
    arrays: list[Array]
    parts: dict[int, RankRuns]  # by rank number at that time
    # ranks with nothing to keep, such as workers of parameter servers
    empty: frozenset[int] = frozenset()


class Neighbours:
    """Which rank keeps which parts: rank r keeps the parts of r - distance, which is on another
    host if there are several."""

    def __init__(self, communicator: Communicator, pieces: Sequence[Piece]) -> None:
        """pieces: this rank's parts. A collective."""
        self.arrays = [Array(piece.name, piece.shape, piece.dtype.str) for piece in pieces]
        self._communicator = communicator
        self._rank = communicator.rank
        self._size = communicator.size
        self._messages: list[np.ndarray] = []  # under way
        away = distance(split_groups(communicator, 0).hosts)
        self._to = (self._rank + away) % self._size
        self._source = (self._rank - away) % self._size
        own: list[Runs] = [list(piece.runs()) for piece in pieces]
        has_parts = communicator.allgather(
            np.array([any(map(_elements, own))], np.uint8), "copy.has_parts"
        )
        self._empty = frozenset(np.flatnonzero(has_parts == 0).tolist())
        self._runs = {self._rank: own}  # and, from the first exchange on, the source's

    def have(self, pieces: Sequence[Piece]) -> bool:
        """Whether these are still the arrays: a user's optimizer creates its state in its first
        step."""
        return [piece.name for piece in pieces] == [array.name for array in self.arrays]

    def exchange(self, pieces: Sequence[Piece], number: int, memory: Copies | None) -> Copies:
        """Exchanges copies of a sync point, reusing the memory of older ones. A collective."""
        if self._source not in self._runs:
            self._runs[self._source] = self._runs_of_source()
        if memory is None or memory.ranks != self._size or memory.arrays != self.arrays:
            parts = {
                rank: RankRuns(runs, np.empty(_nbytes(self.arrays, runs), np.uint8))
                for rank, runs in self._runs.items()
            }
            memory = Copies(number, self._size, self.arrays, parts, self._empty)
        own = memory.parts[self._rank]
        kept = memory.parts[self._source]
        for view, piece in zip(own.arrays_of(self.arrays), pieces, strict=True):
            np.copyto(view, piece.read())
        if kept is not own:
            self._swap(own.memory, kept.memory, "copy.parts")
        return memory._replace(number=number)

    def _runs_of_source(self) -> list[Runs]:
        """Returns the runs of the source. A rank knows only its own and its source's runs: the runs
        of all ranks would grow with the model times the number of ranks."""
        own = self._runs[self._rank]
        counts = np.array([len(runs) for runs in own], np.int64)
        of_source = np.empty_like(counts)
        self._swap(counts, of_source, "copy.counts")
        # (0, 0), so that no message is empty
        ends = np.array([(0, 0), *(run for runs in own for run in runs)], np.int64)
        ends_of_source = np.empty((1 + int(of_source.sum()), 2), np.int64)
        self._swap(ends, ends_of_source, "copy.runs")
        numbers = iter(ends_of_source[1:].tolist())
        return [
            [(first, behind) for first, behind in itertools.islice(numbers, count)]
            for count in of_source.tolist()
        ]

    def _swap(self, own: np.ndarray, of_source: np.ndarray, name: str) -> None:
        """Sends `own` to the rank that keeps it, and receives from the source."""
        # after a loss messages may still arrive: their buffers stay until the neighbours change
        self._messages += [
            own,
            of_source,
        ]
        peers = point_to_point(self._communicator, "guard.lost")
        coming = peers.start_recv(of_source, self._source, name)
        going = peers.start_send(own, self._to, name)
        coming.wait()
        going.wait()
        del self._messages[-2:]


def distance(hosts: Sequence[int]) -> int:
    """Returns the distance from a rank to the rank that keeps its copy: the smallest distance that
    puts the most copies on another host."""
    of_ranks = np.array(hosts)

    def apart(away: int) -> int:  # NumPy, because 8,192 ranks have 67 million pairs
        return int(np.count_nonzero(of_ranks != np.roll(of_ranks, -away)))

    return max(range(1, len(hosts)), key=apart, default=0)


def wholes(
    communicator: Communicator, arrays: Sequence[Array], parts: Sequence[RankRuns]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields whole arrays, one by one, from this rank's parts and the other ranks'. A
    collective."""
    of_parts = [list(part.arrays_of(arrays)) for part in parts]
    at_once = max(1, RUNS_AT_ONCE // communicator.size)
    of_ranks: list[list[Runs]] = []
    for i, array in enumerate(arrays):
        if i % at_once == 0:
            of_ranks = communicator.allgather_object(
                [
                    [run for part in parts for run in part.runs[j]]
                    for j in range(i, min(i + at_once, len(arrays)))
                ]
            )
        own = np.concatenate([np.empty(0, array.dtype), *[of_part[i] for of_part in of_parts]])
        runs = [of_rank[i % at_once] for of_rank in of_ranks]
        yield array.name, gather_one(communicator, array.name, array.shape, own, runs)


def _nbytes(arrays: Sequence[Array], runs: Sequence[Runs]) -> int:
    return sum(
        _aligned(_elements(of) * np.dtype(array.dtype).itemsize)
        for array, of in zip(arrays, runs, strict=True)
    )


def _elements(runs: Runs) -> int:
    return sum(behind - first for first, behind in runs)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT

"""A copy of the training state at the newest sync point, in the memory of each rank: where the living ranks go back to after a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Elastic
from hvdtrain.core.arrays import Arrays, ArrayStream
from hvdtrain.core.pieces import Piece, whole_arrays
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.neighbours import Array, Copies, Neighbours, wholes
from hvdtrain.training.progress.train_state import TrainState


class Kept(NamedTuple):
    """The parts of one sync point that a rank keeps."""

    number: int
    ranks: int  # that had parts
    owners: list[int]  # those whose parts it keeps


class Held(NamedTuple):
    """What a rank has to go back to."""

    number: int  # of the sync point of its arrays
    evaluated: int  # as TrainState's
    parts: list[Kept]


class Restored(NamedTuple):
    """The state that all ranks have."""

    now: TrainState
    from_checkpoint: bool


class MemoryCopy:
    """A copy on each rank of arrays that every rank has: as many bytes as these, on the host.

    Of arrays that ranks have in parts each keeps its own and its neighbour's, of two sync points: when the parts of the newer one begin
    to come, all ranks have those of the older one. Its arrays are copied after that: one that still waits has those of the older one.
    """

    def __init__(self, learner: Learner, communicator: Elastic, now: TrainState) -> None:
        """A collective."""
        self._learner, self._communicator = learner, communicator
        self._arrays: Arrays = {}
        self._parts: list[Copies] = []  # the newest last
        self._neighbours: Neighbours | None = None
        self._number = 0
        self.now = now
        self._copy(now, 0)

    def confirm(self) -> None:
        """Before keep(), behind what all ranks have computed together: fails where a rank was lost in it. A collective."""
        self._communicator.confirm()

    def keep(self, now: TrainState) -> None:
        """At a sync point. A collective where ranks have parts. An evaluation changes no array: they are copied after steps alone."""
        if now.progress.step != self.now.progress.step:
            self._copy(now, self._number + 1)
        self.now = now

    def _copy(self, now: TrainState, number: int) -> None:
        pieces: Iterable[Piece] = self._learner.pieces()
        if self._learner.is_sharded:
            pieces = list(pieces)
            self._copy_parts([piece for piece in pieces if not piece.is_whole], number)
        self._copy_arrays(pieces)
        self._number, self.now = number, now

    def _copy_parts(self, pieces: Sequence[Piece], number: int) -> None:
        if self._neighbours is None or not self._neighbours.have(pieces):
            self._neighbours = Neighbours(self._communicator, pieces)
        memory = self._parts.pop(0) if len(self._parts) == 2 else None
        self._parts.append(self._neighbours.exchange(pieces, number, memory))

    def _copy_arrays(self, pieces: Iterable[Piece]) -> None:
        for name, array in whole_arrays(pieces):
            kept = self._arrays.get(name)
            if kept is None:  # a user's optimizer makes its state in its first step
                self._arrays[name] = array.copy()
            else:
                np.copyto(kept, array)

    def go_on(self) -> TrainState:
        """After a loss that nothing has to be restored for: what was kept, of whichever ranks, is kept until the next sync point."""
        self._neighbours = None
        return self.now

    def restore(self, fall_back: Callable[[], TrainState]) -> Restored:
        """Gives all ranks the newest state of which the living ones have everything together. A collective.

        fall_back: loads an older state into every rank, where parts are gone. Some ranks may have come to a sync point at which others
        found that a rank is lost. Where another rank is lost meanwhile, restore() is called again: what was there before is there still.
        """
        communicator, learner = self._communicator, self._learner
        parts = [Kept(each.number, each.ranks, sorted({*each.parts, *each.empty})) for each in self._parts]
        tables: list[Held] = communicator.allgather_object(Held(self._number, self.now.evaluated, parts))
        number = newest(tables, learner.is_sharded)
        if learner.is_sharded:
            learner.divide_anew()
        if number is None:
            now = fall_back()
        else:
            now = self._load(tables, number)
            if self._number != number:
                self._copy_arrays(learner.pieces())
                self._number, self.now = number, now
        self._parts = [each for each in self._parts if each.number == number]
        self._neighbours = None
        self._copy(now, 1 + max(held.number for held in tables))
        return Restored(now, number is None)

    def _load(self, tables: Sequence[Held], number: int) -> TrainState:
        """The state of this sync point, into the learner. A collective."""
        communicator, rank = self._communicator, self._communicator.rank
        source = max(range(len(tables)), key=lambda each: (tables[each].number == number, tables[each].evaluated))
        parts = next((each for each in self._parts if each.number == number), None)
        arrays = [Array(name, array.shape, array.dtype.str) for name, array in self._arrays.items()]
        own = (self.now, arrays, parts.arrays if parts else [])
        now: TrainState
        now, arrays, in_parts = communicator.broadcast_object(own, source)
        givers = {owner: holder for holder in reversed(range(len(tables))) for owner in _owners(tables[holder], number)}
        given = [part for owner, part in parts.parts.items() if givers[owner] == rank] if parts else []
        is_everywhere = all(held.number == number for held in tables)

        def stream() -> Iterator[tuple[str, np.ndarray]]:
            yield from self._arrays.items() if is_everywhere else self._from(source, arrays)
            yield from wholes(communicator, in_parts, given) if in_parts else ()

        self._learner.load(ArrayStream({array.name: tuple(array.shape) for array in (*arrays, *in_parts)}, stream()))
        return now

    def _from(self, source: int, arrays: Sequence[Array]) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of one rank, one by one."""
        for name, shape, dtype in arrays:
            array = self._arrays[name].copy() if self._communicator.rank == source else np.empty(shape, dtype)
            yield name, self._communicator.broadcast(array, f"state.{name}", source)


def newest(tables: Sequence[Held], in_parts: bool) -> int | None:
    """The number of the newest sync point of which ranks with these tables have everything together; None where parts are gone."""
    for number in sorted({held.number for held in tables}, reverse=True):
        owners = {owner for held in tables for owner in _owners(held, number)}
        ranks = max((kept.ranks for held in tables for kept in held.parts if kept.number == number), default=0)
        if not in_parts or (ranks and len(owners) == ranks):
            return number
    return None


def _owners(held: Held, number: int) -> list[int]:
    return [owner for kept in held.parts if kept.number == number for owner in kept.owners]

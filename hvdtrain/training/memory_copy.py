"""A copy of the training state at the newest sync point, in the memory of each rank: where the living ranks go back to after a loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays, ArrayStream
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.progress.train_state import TrainState


class MemoryCopy:
    """Of weights, buffers and optimizer state that every rank has: as many bytes as these, on the host."""

    def __init__(self, learner: Learner, now: TrainState) -> None:
        self._learner = learner
        self._arrays: Arrays = {piece.name: piece.array.copy() for piece in learner.pieces()}
        self.now = now

    def keep(self, now: TrainState) -> None:
        """At a sync point. An evaluation changes no array: they are copied where steps were done since the last call."""
        if now.progress.step != self.now.progress.step:
            self._copy_arrays()
        self.now = now

    def _copy_arrays(self) -> None:
        for piece in self._learner.pieces():
            kept = self._arrays.get(piece.name)
            if kept is None:  # a user's optimizer makes its state in its first step
                self._arrays[piece.name] = piece.array.copy()
            else:
                np.copyto(kept, piece.array)

    def restore(self, communicator: Communicator) -> TrainState:
        """Gives all ranks the state of the newest copy that one of them has, and returns it. A collective.

        Some ranks may have come to a sync point at which others found that a rank is lost. A copy is replaced only once all of the new
        one is there: where another rank is lost meanwhile, restore() is called again.
        """
        positions = communicator.allgather_object((self.now.progress.step, self.now.evaluated))
        newest = max(positions)
        source = positions.index(newest)
        now: TrainState = communicator.allgather_object(self.now if communicator.rank == source else None)[source]
        if all(step == newest[0] for step, _ in positions):
            self._learner.load(self._arrays)
        else:
            self._learner.load(self._from(communicator, source))
        self.keep(now)
        return now

    def _from(self, communicator: Communicator, source: int) -> ArrayStream:
        """The arrays of one rank, one by one."""
        schema = [(name, array.shape, array.dtype.str) for name, array in self._arrays.items()]
        schema = communicator.allgather_object(schema if communicator.rank == source else None)[source]

        def arrays() -> Iterator[tuple[str, np.ndarray]]:
            for name, shape, dtype in schema:
                array = self._arrays[name].copy() if communicator.rank == source else np.empty(shape, dtype)
                yield name, communicator.broadcast(array, f"state.{name}", source)

        return ArrayStream({name: tuple(shape) for name, shape, _ in schema}, arrays())

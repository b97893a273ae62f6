"""The checkpoints of a custom loop: the trainer's files, with the script's additional values and
its data position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import long_on_rank_0, on_rank_0
from hvdtrain.core.arrays import Arrays, ArrayStream, Piece, whole
from hvdtrain.core.metrics import Better, scalar
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import HasState
from hvdtrain.training.checkpoint.files import Identity
from hvdtrain.training.checkpoint.resume import check_identity, newest_good
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.broadcast import broadcast_state

# the trainer's loop does not resume from these checkpoints, nor a custom loop from the trainer's
IDENTITY: Identity = {"loop": "a script's own"}
_PREFIX = "e."


class WithExtra:
    """A learner whose state includes additional arrays, the same on all ranks; only for the
    checkpoint writer."""

    def __init__(self, learner: HasState) -> None:
        self._learner = learner
        self.is_sharded = learner.is_sharded
        self.extra: Arrays = {}

    def state(self, *, is_kept: bool = True) -> Arrays:
        return self._learner.state(is_kept=is_kept) | self.extra

    def pieces(self) -> Iterator[Piece]:
        yield from self._learner.pieces()
        yield from (whole(name, array) for name, array in self.extra.items())

    def state_dict_names(self) -> dict[str, str]:
        return self._learner.state_dict_names()

    def load(self, state: Arrays | ArrayStream) -> None:
        self._learner.load(state)


class Restored(NamedTuple):
    """The restored state of a script, the same on all ranks."""

    train_state: TrainState
    extra: Arrays
    notes: list[str]  # about damaged checkpoints that were skipped


def restore(
    communicator: Communicator,
    learner: HasState,
    run: Path | None,
    limit_bytes: int,
    go_on: Callable[[], None] = lambda: None,
) -> Restored | None:
    """Loads the newest good checkpoint of rank 0's folder into every rank; None if there is no
    folder to resume from.

    go_on: called on every rank as loading progresses.

    Every rank calls it. Raises UserError on all ranks if no checkpoint is good, or if it belongs to
    another model or to the trainer's loop.
    """
    arrays: Arrays = {}

    def read(moved: Callable[[], None]) -> tuple[TrainState | None, list[str]]:
        if run is None:
            return None, []
        found, read_arrays, notes = newest_good(
            run, limit_bytes, mapped=learner.is_sharded, on_piece=moved
        )
        check_identity(found, IDENTITY)
        arrays.update(read_arrays)
        return found.train_state, notes

    train_state, notes = long_on_rank_0(communicator, read, go_on)
    if train_state is None:
        return None
    extra = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
    state = {name: array for name, array in arrays.items() if not name.startswith(_PREFIX)}
    broadcast_state(communicator, learner, state if communicator.rank == 0 else {}, on_array=go_on)
    return Restored(train_state, _broadcast(communicator, extra), notes)


def _broadcast(communicator: Communicator, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Broadcasts rank 0's arrays, by name. A collective."""
    schema = communicator.broadcast_object(
        [(name, list(array.shape), array.dtype.str) for name, array in arrays.items()]
    )
    arrays_of_root: Arrays = {}
    for name, shape, dtype in schema:
        own = (
            np.require(arrays[name], requirements=["C", "W"])
            if communicator.rank == 0
            else np.zeros(shape, dtype)
        )
        arrays_of_root[name] = communicator.broadcast(own.reshape(-1), f"extra.{name}").reshape(
            shape
        )
    return arrays_of_root


def evaluated(
    communicator: Communicator, now: TrainState, value: Any, better: Better
) -> TrainState:
    """Returns the state with rank 0's value of an evaluation at this step; a value that is not
    finite is never best. A collective.

    Raises UserError on every rank for a value that is not a number, or if `better` has changed.
    """
    where = "ctx.checkpoint(objective=...)"
    if better not in ("min", "max"):
        raise UserError(
            f"better={better!r:.40}", where, "min, as for a loss, or max, as for an accuracy"
        )
    if not math.isnan(now.best) and better != now.better:
        what = f"better={better}, but earlier evaluations had better={now.better}"
        raise UserError(what, where, "one kind of objective in a run; or another run=")
    number = on_rank_0(communicator, lambda: float(scalar("objective", value, where)))
    # whole epochs before the one that this step ends or lies in
    before = max(0, math.ceil(now.progress.epochs) - 1)
    found = replace(now, objective="objective", better=better, epoch=before)
    return found.after_evaluation(number if math.isfinite(number) else math.nan, None, now.seconds)


def decoded(extra: Arrays, decode: Callable[[Arrays], dict[str, Any]], run: Path) -> dict[str, Any]:
    """Decodes the values that the script saved. Raises UserError if they cannot be read."""
    try:
        return decode(extra)
    except ValueError as error:
        raise UserError(
            f"the extra values that the script saved cannot be read: {error}",
            str(run),
            "an older checkpoint, or another run=",
        ) from None

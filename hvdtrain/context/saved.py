"""The checkpoints of a custom loop: the trainer's files, with the script's additional values and
its data position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.core.arrays import Arrays, ArrayStream, Piece, whole
from hvdtrain.core.metrics import Better, scalar
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import HasState
from hvdtrain.training.checkpoint.files import Identity
from hvdtrain.training.checkpoint.load import load_found
from hvdtrain.training.checkpoint.ranges import CheckpointInParts
from hvdtrain.training.checkpoint.resume import Reading, check_identity, newest
from hvdtrain.training.progress.train_state import TrainState

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

    def find(
        reading: Reading,
    ) -> tuple[tuple[TrainState | None, list[str]], Arrays | CheckpointInParts | None]:
        if run is None:
            return (None, []), None
        good = newest(run, reading)
        check_identity(good.checkpoint, IDENTITY)
        return (good.checkpoint.train_state, good.notes), good.arrays

    loaded = load_found(
        communicator, learner, find, limit_bytes, go_on, lambda name: name.startswith(_PREFIX)
    )
    train_state, notes = loaded.found
    return None if train_state is None else Restored(train_state, loaded.extra, notes)


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
    # completed epochs before the one that contains or ends with this step
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

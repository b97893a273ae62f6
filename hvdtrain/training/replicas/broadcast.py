"""Broadcasts rank 0's weights, buffers and optimizer state at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import same_on_all_ranks
from hvdtrain.core.arrays import (
    ArrayStream,
    Piece,
    Readable,
    combine,
    digests_of_pieces,
    whole,
)
from hvdtrain.frameworks.learner import MADE_BY, HasState


class ArraySchema(NamedTuple):
    """An array that rank 0 has."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def broadcast_state(
    communicator: Communicator,
    learner: HasState,
    restored: Mapping[str, Readable] | None,
    *,
    only_weights: bool = False,
    on_array: Callable[[], None] = lambda: None,
) -> str:
    """Loads rank 0's state (what it restored, or its initial one) into every rank's learner;
    returns the common digest.

    restored: None for the initial state; only rank 0's is used. only_weights: `restored` has no
    optimizer state; each rank keeps its own. on_array: called after each array is sent.

    Weights, buffers and optimizer state are sent as data: creating optimizer state with a step
    would change the weights. They are sent one by one, and a rank keeps its shards. For an initial
    state, which is a function of the seed, ranks compare digests and send only arrays that differ.
    Sharded initial optimizer state is never sent, because it does not depend on the weights.

    Raises RuntimeError if digests differ after that.
    """
    is_initial = communicator.broadcast_object(restored is None)
    if is_initial:
        pieces = _different(communicator, [p for p in learner.pieces() if p.is_whole])
        on_array()
        is_partial = True
    else:
        pieces = [whole(name, array) for name, array in (restored or {}).items()]
        is_partial = only_weights
    own = (
        (is_partial, [ArraySchema(p.name, p.shape, p.dtype.str) for p in pieces])
        if communicator.rank == 0
        else None
    )
    # only rank 0 knows whether the arrays are complete
    is_partial, schema = communicator.broadcast_object(own)
    loads_its_own = is_initial and communicator.rank == 0
    stream = ArrayStream(
        {name: tuple(shape) for name, shape, _ in schema},
        _broadcast(communicator, schema, pieces, on_array),
        is_partial,
    )
    if loads_its_own:
        for _ in stream.arrays:
            pass
    elif schema or not is_partial:
        learner.load(stream)
    return common_digest(communicator, learner)


def _different(communicator: Communicator, pieces: list[Piece]) -> list[Piece]:
    """Returns the pieces whose numbers are not the same on all ranks, in the same order on all
    ranks. A collective."""
    if communicator.size == 1 or not pieces:
        return []
    numbers = digests_of_pieces((piece.name, piece) for piece in pieces)
    is_same = same_on_all_ranks(communicator, [numbers[piece.name] for piece in pieces])
    names = {piece.name for piece, same in zip(pieces, is_same, strict=True) if not same}
    if any(name.startswith("s.") for name in names):  # load() checks the class that made it
        names |= {piece.name for piece in pieces if piece.name.startswith(MADE_BY)}
    return [piece for piece in pieces if piece.name in names]


def common_digest(communicator: Communicator, learner: HasState) -> str:
    """Returns the digest of the replicated arrays. A collective. Raises RuntimeError if ranks
    differ."""
    replicated = ((piece.name, piece) for piece in learner.pieces() if piece.is_whole)
    state_digests = communicator.allgather_object(combine(digests_of_pieces(replicated)))
    if len(set(state_digests)) > 1:
        # a bug of hvdtrain, or faulty memory
        raise RuntimeError(f"ranks differ after the start: digests {state_digests}")
    return str(state_digests[0])


def _broadcast(
    communicator: Communicator,
    schema: list[ArraySchema],
    own: list[Piece],
    on_array: Callable[[], None],
) -> Iterator[tuple[str, np.ndarray]]:
    """Broadcasts rank 0's arrays, one by one. An array mapped from a file, which is read-only, is
    copied while it is sent."""
    for i, (name, shape, dtype) in enumerate(schema):
        array = (
            np.require(own[i].read(), requirements=["C", "W"]).reshape(shape)
            if communicator.rank == 0
            else np.zeros(shape, dtype)
        )
        yield name, communicator.broadcast(array, f"state.{name}")
        on_array()

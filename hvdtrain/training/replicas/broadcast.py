"""Broadcasts rank 0's weights, buffers and optimizer state at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays, ArrayStream, Piece, combine, digests, whole, whole_arrays
from hvdtrain.frameworks.learner import HasState


def broadcast_state(
    communicator: Communicator,
    learner: HasState,
    restored: Arrays | None,
    *,
    only_weights: bool = False,
    on_array: Callable[[], None] = lambda: None,
) -> str:
    """Loads rank 0's state (what it restored, or its initial one) into every rank's learner;
    returns the common digest.

    only_weights: `restored` has no optimizer state; each rank keeps its own. on_array: called after
    each array is sent.

    Weights, buffers and optimizer state are sent as data: creating optimizer state with a step
    would change the weights. They are sent one by one, and a rank keeps its shards. Sharded initial
    optimizer state is not sent: it does not depend on the weights.

    Raises RuntimeError if digests differ after that.
    """
    if restored is None:
        pieces = [piece for piece in learner.pieces() if piece.is_whole]
        is_partial = learner.is_sharded
    else:
        pieces = [whole(name, array) for name, array in restored.items()]
        is_partial = only_weights
    own = (
        (is_partial, [(piece.name, piece.shape, piece.dtype.str) for piece in pieces])
        if communicator.rank == 0
        else None
    )
    # only rank 0 knows whether the arrays are complete
    is_partial, schema = communicator.broadcast_object(own)
    loads_its_own = restored is None and communicator.rank == 0
    stream = ArrayStream(
        {name: tuple(shape) for name, shape, _ in schema},
        _broadcast(communicator, schema, pieces, on_array),
        is_partial,
    )
    if loads_its_own:
        for _ in stream.arrays:
            pass
    else:
        learner.load(stream)
    return common_digest(communicator, learner)


def common_digest(communicator: Communicator, learner: HasState) -> str:
    """The digest of the replicated arrays. A collective. Raises RuntimeError if ranks differ."""
    state_digests = communicator.allgather_object(combine(digests(whole_arrays(learner.pieces()))))
    if len(set(state_digests)) > 1:
        # a bug of hvdtrain, or faulty memory
        raise RuntimeError(f"ranks differ after the start: digests {state_digests}")
    return str(state_digests[0])


def _broadcast(
    communicator: Communicator,
    schema: list[tuple[str, tuple[int, ...], str]],
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

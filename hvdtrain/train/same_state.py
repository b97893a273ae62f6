"""Every rank starts from the same state: rank 0's, sent as data, and the digests compared."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.digest import combine, digests
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner

T = TypeVar("T")


def on_rank_0(communicator: Communicator, work: Callable[[], T]) -> T:
    """What rank 0's work() returns, on every rank; where it is a UserError every rank raises that. Small things only."""
    return communicator.allgather_object(on_rank_0_alone(communicator, work))[0]


def on_rank_0_alone(communicator: Communicator, work: Callable[[], T]) -> T | None:
    """The same, but what it returns stays on rank 0; the others get None."""
    result: T | None = None
    failure: UserError | None = None
    if communicator.rank == 0:
        try:
            result = work()
        except UserError as error:
            failure = error
    failure = communicator.allgather_object(failure)[0]
    if failure:
        raise failure
    return result


def agree(communicator: Communicator, facts: dict[str, Any]) -> None:
    """Raises the same UserError on all ranks where a fact (size of a data set, configuration) differs between them."""
    everyone = communicator.allgather_object((socket.gethostname(), facts))
    for rank, (host, theirs) in enumerate(everyone):
        for name, value in everyone[0][1].items():
            if theirs[name] != value:
                what = f"{name} differs between ranks: {value} on rank 0, {theirs[name]} on rank {rank}"
                raise UserError(what, f"hosts {everyone[0][0]} and {host}", "give every rank the same command and the same data")


def share_state(communicator: Communicator, learner: Learner, restored: Arrays | None) -> str:
    """Loads rank 0's state (what it restored, or its initial one) into every rank's learner; returns the common digest.

    Weights, buffers and slots travel as data: stepping an optimizer to make its slots would change the weights.
    """
    state = restored if restored is not None else learner.state()
    schema = communicator.allgather_object(
        [(name, array.shape, array.dtype.str) for name, array in state.items()] if communicator.rank == 0 else None
    )[0]
    mine = {} if communicator.rank else state
    received: Arrays = {}
    for name, shape, dtype in schema:
        array = np.ascontiguousarray(mine[name]) if communicator.rank == 0 else np.zeros(shape, dtype)
        received[name] = communicator.broadcast(array.reshape(shape), f"state.{name}")
    learner.load(received)
    everyone = communicator.allgather_object(combine(digests(learner.views())))
    if len(set(everyone)) > 1:
        raise RuntimeError(f"ranks differ after the start: digests {everyone}")  # our own bug, or memory that lies
    return str(everyone[0])

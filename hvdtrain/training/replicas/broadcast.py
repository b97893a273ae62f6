"""Every rank starts from the same job and from rank 0's state: what Horovod's broadcast_parameters and broadcast_optimizer_state do."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.digest import combine, digests
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner


def check_same_facts(communicator: Communicator, facts: dict[str, Any]) -> None:
    """Raises the same UserError on all ranks where a fact (size of a data set, key of the configuration) differs between them."""
    of_all = communicator.allgather_object((socket.gethostname(), facts))
    host_0, facts_0 = of_all[0]
    for rank, (host, theirs) in enumerate(of_all):
        for name, value in facts_0.items():
            if theirs[name] != value:
                what = f"{name} differs between ranks: {value} on rank 0, {theirs[name]} on rank {rank}"
                raise UserError(what, f"hosts {host_0} and {host}", "give every rank the same command and the same data")


def broadcast_state(communicator: Communicator, learner: Learner, restored: Arrays | None) -> str:
    """Loads rank 0's state (what it restored, or its initial one) into every rank's learner; returns the common digest.

    Weights, buffers and optimizer state travel as data: a step of the optimizer, to make its state, would change the weights.
    A rank holds one host copy of the state at most: rank 0 what it restored, the others what they receive.

    Raises RuntimeError where digests differ after that.
    """
    if communicator.rank:
        learner.load(_receive(communicator))
    elif restored is None:
        _send(communicator, dict(learner.views()))
    else:
        _send(communicator, restored)
        learner.load(restored)
    state_digests = communicator.allgather_object(combine(digests(learner.views())))
    if len(set(state_digests)) > 1:
        raise RuntimeError(f"ranks differ after the start: digests {state_digests}")  # a bug of hvdtrain, or faulty memory
    return str(state_digests[0])


def _send(communicator: Communicator, state: Arrays) -> None:
    """Rank 0's part of the broadcast: names, shapes and dtypes of all arrays, then each array."""
    communicator.allgather_object([(name, array.shape, array.dtype.str) for name, array in state.items()])
    for name, array in state.items():
        communicator.broadcast(np.ascontiguousarray(array).reshape(array.shape), f"state.{name}")


def _receive(communicator: Communicator) -> Arrays:
    """The part of every other rank."""
    schema = communicator.allgather_object(None)[0]
    return {name: communicator.broadcast(np.zeros(shape, dtype), f"state.{name}") for name, shape, dtype in schema}

"""Work that rank 0 does alone; its result, or its UserError, reaches every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.comm.communicator import Communicator
from hvdtrain.errors import UserError

T = TypeVar("T")


def on_rank_0(communicator: Communicator, work: Callable[[], T]) -> T:
    """Returns on every rank what work() returns on rank 0, a small object. Every rank calls it.

    Raises on every rank the UserError that work() raises.
    """
    return communicator.allgather_object(on_rank_0_only(communicator, work))[0]


def on_rank_0_only(communicator: Communicator, work: Callable[[], T]) -> T | None:
    """Returns what work() returns on rank 0, and None on the other ranks. Every rank calls it.

    Raises on every rank the UserError that work() raises.
    """
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

"""Waiting: for what was begun, for other ranks, for the last one of them."""

from __future__ import annotations

from typing import Any

from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once. Begins and makes what does not need to wait for other ranks."""
    return JOB.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for what was begun, and returns its result; None for a handle that was synchronized before.

    Raises HorovodInternalError where ranks do not agree, or one of them does not take part: the message names them.
    """
    return JOB.wait(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every rank of the process set has called it."""
    JOB.barrier(process_set.process_set_id)


def join(device: int = -1) -> int:
    """Says that this rank has no more data: until every rank has joined it takes part, with nothing, in what the others reduce.

    Averages are over the ranks that have not joined. Returns the rank that joined last. `device` is not needed.
    """
    return JOB.join()

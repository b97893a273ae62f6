"""init(), shutdown(), and where this rank is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.process_sets import ProcessSet, begin, end


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connects the ranks that a launcher has started; nothing where they are connected.

    comm: None for all ranks; a list of ranks or an mpi4py communicator for some of them (MPI alone). process_sets: ProcessSets to add;
    "dynamic" is taken too: process sets can always be added. HVDTRAIN_ENGINE selects the engine.
    """
    process_sets = _checked(process_sets)
    JOB.start(comm)
    begin(process_sets)


def _checked(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    given: list[Any] = [process_sets] if isinstance(process_sets, str) else list(process_sets)
    wrong = [each for each in given if not isinstance(each, ProcessSet)]
    if wrong:
        fix = 'process_sets=[hvd.ProcessSet([0, 1])], or "dynamic"'
        raise BadCall(f"{wrong[0]!r:.100} is no process set", "hvd.init(process_sets=...)", fix)
    return given


def shutdown() -> None:
    """Ends the job, once every rank calls it; a rank that still waits for this one gets an error."""
    JOB.shutdown()
    end()


def recover(error: BaseException) -> None:
    """Goes on without the ranks that are lost, and without process sets. Raises the error where no rank is, or the engine cannot."""
    JOB.recover(error)
    end()
    begin([])


def is_initialized() -> bool:
    return JOB.is_initialized


def rank() -> int:
    return JOB.engine.rank


def size() -> int:
    return JOB.engine.size


def local_rank() -> int:
    """Among the ranks of this host."""
    return JOB.engine.local_rank


def local_size() -> int:
    return JOB.engine.local_size


def cross_rank() -> int:
    """The number of this host among those that have a rank of this local rank."""
    return JOB.engine.cross_rank


def cross_size() -> int:
    return JOB.engine.cross_size


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    return JOB.engine.is_homogeneous

"""Process sets: which ranks make a collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.horovod.engine.engine import GLOBAL
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB


class ProcessSet:
    """Some ranks, ascending. It has a process_set_id once it is added: by init() or add_process_set()."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Raises ValueError for what are no ranks. An mpi4py communicator stands for its ranks in MPI_COMM_WORLD."""
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            self.ranks = sorted(_world_ranks(ranks_or_comm))
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise BadCall(f"{ranks!r:.100} are no ranks", "hvd.ProcessSet()", "a list of ranks, or an mpi4py communicator")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """The number of its ranks; None where it is not added."""
        return None if self.process_set_id is None else len(JOB.engine.ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """The place of this rank in it; None where it is not added. Raises ValueError on other ranks."""
        if self.process_set_id is None:
            return None
        ranks, rank = JOB.engine.ranks_of(self.process_set_id), JOB.engine.rank
        if rank not in ranks:
            raise BadCall(
                f"rank {rank} is not part of the process set of ranks {ranks}", "process_set.rank()", "process_set.included() first"
            )
        return ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this rank is one of them."""
        return None if self.ranks is None else JOB.engine.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])  # all ranks, from init() on
global_process_set.process_set_id = GLOBAL
_added: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Every rank of the job calls it, also those that are not part of it. Raises ValueError where there is one of these ranks."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= JOB.engine.size:
        raise BadCall(
            f"{ranks} are not different ranks of {JOB.engine.size}", "hvd.add_process_set()", f"some of 0 to {JOB.engine.size - 1}"
        )
    process_set.process_set_id = JOB.engine.add_set(ranks)
    _added.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Whether it was one, and not that of all ranks. Every rank of the job calls it."""
    set_id = process_set.process_set_id
    if set_id is None or set_id == GLOBAL:
        return False
    process_set.process_set_id = None
    return JOB.engine.remove_set(set_id)


def begin(process_sets: Sequence[ProcessSet]) -> None:
    """Makes the process sets, at init()."""
    global_process_set.ranks = JOB.engine.ranks_of(GLOBAL)
    for process_set in process_sets:
        if process_set.process_set_id is None:
            add_process_set(process_set)


def end() -> None:
    """Ends all process sets, at shutdown(): no process set but that of all ranks is one any more."""
    for process_set in _added:
        process_set.process_set_id = None
    _added.clear()


def _world_ranks(comm: Any) -> list[int]:
    from hvdtrain.comm.mpi import load

    group, world = comm.Get_group(), load().COMM_WORLD.Get_group()
    return [int(rank) for rank in group.Translate_ranks(list(range(group.Get_size())), world)]

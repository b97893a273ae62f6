"""init() and shutdown(), ranks and sizes, build information, traces for Perfetto or
chrome://tracing, process sets."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import GLOBAL
from hvdtrain.horovod.job import JOB


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connects the ranks that a launcher started; does nothing if they are connected.

    comm: None for all ranks; a list of ranks or an mpi4py communicator for some of them (only with
    MPI). process_sets: ProcessSets to add; "dynamic" is accepted, too: process sets can always be
    added. HVDTRAIN_ENGINE selects the engine.
    """
    process_sets = _checked(process_sets)
    JOB.start(comm)
    begin_process_sets(process_sets)


def _checked(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None or (
        isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    ):
        return []
    given: list[Any] = [process_sets] if isinstance(process_sets, str) else list(process_sets)
    wrong = [each for each in given if not isinstance(each, ProcessSet)]
    if wrong:
        fix = 'process_sets=[hvd.ProcessSet([0, 1])], or "dynamic"'
        raise BadCall(f"{wrong[0]!r:.100} is not a process set", "hvd.init(process_sets=...)", fix)
    return given


def shutdown() -> None:
    """Ends the job when every rank has called it; a rank that still waits for this one gets an
    error."""
    JOB.shutdown()
    end_process_sets()


def recover(error: BaseException) -> None:
    """Continues without the lost ranks, and without process sets. Raises the error if no rank is
    lost, or if the engine cannot continue."""
    JOB.recover(error)
    end_process_sets()
    begin_process_sets([])


def is_initialized() -> bool:
    return JOB.is_initialized


def rank() -> int:
    return JOB.engine.rank


def size() -> int:
    return JOB.engine.size


def local_rank() -> int:
    """Returns this rank's number among the ranks of its host."""
    return JOB.engine.local_rank


def local_size() -> int:
    return JOB.engine.local_size


def cross_rank() -> int:
    """Returns the number of this host among the hosts that have a rank with this local rank."""
    return JOB.engine.cross_rank


def cross_size() -> int:
    return JOB.engine.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return JOB.engine.is_homogeneous


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether the ranks of this job are connected by MPI: on the mpi engine, and by Horovod on
    MPI."""
    return JOB.is_initialized and JOB.engine.name in ("mpi", "horovod on MPI")


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at the same time. Raises ValueError if MPI does not
    run."""
    if not mpi_enabled():
        raise BadCall(
            "Horovod MPI is not enabled", "hvd.mpi_threads_supported()", "HVDTRAIN_ENGINE=mpi"
        )
    from hvdtrain.comm.mpi import load

    mpi = load()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Whether torch.distributed has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the ranks of this job are connected by Gloo: on the torchdist engine, and by Horovod
    without MPI."""
    return JOB.is_initialized and JOB.engine.name in ("torchdist", "horovod on Gloo")


def nccl_built() -> int:
    """Returns the version of torch's NCCL, in NCCL's numbering; 0 if there is none."""
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0)[:3]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Returns False, because IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """Returns False, because Intel's library is not used."""
    return False


def sycl_built() -> bool:
    """Returns False, because Intel's GPUs are not used."""
    return False


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Does nothing for "horovod.torch" and "horovod.tensorflow", which need no extension here.
    Raises ImportError for others."""
    known = ("horovod", "horovod.torch", "horovod.tensorflow")
    if ext_name.removeprefix("hvdtrain.") not in known or ext_name == "horovod":
        raise ImportError(
            f"Extension {ext_name} has not been built: hvdtrain.horovod is for torch, TensorFlow "
            "and Keras"
        )


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins a trace in a new file, on rank 0; with "{rank}" in the path, every rank that calls it
    writes a separate file.

    Each name has a row: NEGOTIATE_ALLREDUCE from the call until every rank has called it; ALLREDUCE
    during the collective, with dtype, shape, and the number of tensors that share it. mark_cycles:
    marks the beginning of each negotiation round. HOROVOD_TIMELINE=PATH begins one in init().
    """
    JOB.engine.start_timeline(str(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the trace; the file is complete."""
    JOB.engine.stop_timeline()


class ProcessSet:
    """A set of ranks, ascending. It has a process_set_id after init() or add_process_set() has
    added it."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Raises ValueError for anything but ranks. An mpi4py communicator stands for its ranks in
        MPI_COMM_WORLD."""
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            self.ranks = sorted(_world_ranks(ranks_or_comm))
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise BadCall(
                f"{ranks!r:.100} are not ranks",
                "hvd.ProcessSet()",
                "a list of ranks, or an mpi4py communicator",
            )
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Returns the number of its ranks; None if it is not added."""
        return (
            None if self.process_set_id is None else len(JOB.engine.ranks_of(self.process_set_id))
        )

    def rank(self) -> int | None:
        """Returns the rank's place in the set; None if it is not added. Raises ValueError on other
        ranks."""
        if self.process_set_id is None:
            return None
        ranks = JOB.engine.ranks_of(self.process_set_id)
        rank = JOB.engine.rank
        if rank not in ranks:
            raise BadCall(
                f"rank {rank} is not part of the process set of ranks {ranks}",
                "process_set.rank()",
                "check process_set.included() first",
            )
        return ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this rank is one of them."""
        return None if self.ranks is None else JOB.engine.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])  # all ranks, from init() on
global_process_set.process_set_id = GLOBAL
_added: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set. Every rank of the job calls it, including ranks outside of the set.
    Raises ValueError if there is one of these ranks."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= JOB.engine.size:
        raise BadCall(
            f"{ranks} are not distinct ranks of a job of {JOB.engine.size}",
            "hvd.add_process_set()",
            f"distinct ranks from 0 to {JOB.engine.size - 1}",
        )
    process_set.process_set_id = JOB.engine.add_set(ranks)
    _added.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; False if it does not exist or is the global one. Every rank of the job
    calls it."""
    set_id = process_set.process_set_id
    if set_id is None or set_id == GLOBAL:
        return False
    process_set.process_set_id = None
    return JOB.engine.remove_set(set_id)


def begin_process_sets(process_sets: Sequence[ProcessSet]) -> None:
    """Creates the process sets at init()."""
    global_process_set.ranks = JOB.engine.ranks_of(GLOBAL)
    for process_set in process_sets:
        if process_set.process_set_id is None:
            add_process_set(process_set)


def end_process_sets() -> None:
    """Ends all process sets except the global one, at shutdown()."""
    for process_set in _added:
        process_set.process_set_id = None
    _added.clear()


def _world_ranks(comm: Any) -> list[int]:
    from hvdtrain.comm.mpi import load

    group = comm.Get_group()
    world = load().COMM_WORLD.Get_group()
    return [int(rank) for rank in group.Translate_ranks(list(range(group.Get_size())), world)]

"""Where this process stands among the processes that one launcher started: rank, size, local rank, local size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.errors import UserError


@dataclass(frozen=True)
class Placement:
    """What the launcher said. launcher is "none" where nobody launched us."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    launcher: str

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            what = f"rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}, cannot be"
            raise UserError(what, f"the variables of {self.launcher}", _ONE_LAUNCHER)


class LauncherMismatch(UserError):
    """Processes of one job that do not see each other: every one of them says the same."""


class Launcher(NamedTuple):
    """A row of the table: the variables that a launcher gives each of its processes."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    open_mpi: bool | None = None  # True: serves Open MPI only; False: serves any MPI but that; None: either
    anyones: bool = False  # names that anyone may set: they count where rank and size are there both, and no other launcher said the same

    @property
    def variables(self) -> tuple[str, str, str, str]:
        return self[1:5]


class Binding(NamedTuple):
    """The library under an engine, and what mends it when it is not the launcher's."""

    engine: str
    library: str  # "mpi4py uses Open MPI v5.0.11"
    fix: str


# In order of precedence. `mpirun` inside a batch job leaves SLURM_PROCID=0 on every rank: srun comes last.
LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        open_mpi=True,
    ),
    Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    Launcher("Hydra's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", open_mpi=False),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", anyones=True),
)
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
NO_LAUNCHER = Placement(0, 1, 0, 1, "none")

_STRANGE = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK")  # ranks that would each train alone
_ONE_LAUNCHER = "start it with one launcher, from a shell that no other launcher started"
_BY_HAND = (
    "torchrun --nproc-per-node N sets all four; or set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 where each host (or pod) has one process; "
    "or unset RANK and WORLD_SIZE where they are not meant for this job"
)
_FIRST_TRY = {
    "srun": "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); or ",
    "horovodrun": "comm.engine=horovod; or ",
    "torchrun": "comm.engine=torchdist; or ",
}
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM's numbers for the batch script, an interactive shell, ... are above it


def placement(environ: Mapping[str, str]) -> Placement:
    """The placement that one launcher's variables tell; an incomplete or contradictory set is refused."""
    told: list[Placement] = []
    for launcher in LAUNCHERS:
        told += [place] if (place := _told(launcher, environ, told)) else []
    for other in told[1:]:
        if (other.rank, other.size) != (told[0].rank, told[0].size):
            one, two = (f"{p.launcher} says rank {p.rank} of {p.size}" for p in (told[0], other))
            raise UserError(f"{one}, but {two}", "the environment variables", _ONE_LAUNCHER)
    place = told[0] if told else _step(environ)
    strange = [key for key in _STRANGE if key in environ]
    if not place and strange:
        what = f"a launcher that is not known here started this process: it set {', '.join(strange)}"
        raise UserError(what, "the environment", f"known: {', '.join(row.name for row in (*LAUNCHERS, SRUN))}")
    return place or NO_LAUNCHER


def _told(launcher: Launcher, environ: Mapping[str, str], before: Sequence[Placement]) -> Placement | None:
    """A launcher's placement, or None if it was not there. srun --mpi=pmi2 gives PMI's rank and size only: then it is srun's to tell."""
    missing = [key for key in launcher.variables if key not in environ]
    if len(missing) == len(launcher.variables) or (launcher.anyones and {launcher.rank, launcher.size} & {*missing}):
        return None
    others = [*(before if launcher.anyones else ()), *([step] if missing and (step := _step(environ)) else [])]
    if missing and any(_agrees(other, launcher, environ) for other in others):
        return None
    if missing:
        what = f"{launcher.name} set some of its variables, but not {', '.join(missing)}"
        raise UserError(what, "the environment", _BY_HAND if launcher.anyones else _ONE_LAUNCHER)
    rank, size, local_rank, local_size = (_whole(environ, key) for key in launcher.variables)
    return Placement(rank, size, local_rank, local_size, launcher.name)


def _agrees(step: Placement, launcher: Launcher, environ: Mapping[str, str]) -> bool:
    return all(key in environ and _whole(environ, key) == value for key, value in ((launcher.rank, step.rank), (launcher.size, step.size)))


def _step(environ: Mapping[str, str]) -> Placement | None:
    """srun's placement; None in the batch script itself and in an allocation's shell, which are one process each."""
    if SRUN.rank not in environ or SRUN.size not in environ:
        return None
    if "SLURM_STEP_ID" in environ and _whole(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    missing = [key for key in (*SRUN.variables, "SLURM_NODEID") if key not in environ]
    if missing:
        raise UserError(f"srun set some of its variables, but not {', '.join(missing)}", "the environment", _ONE_LAUNCHER)
    tasks = _tasks_per_node(environ[SRUN.local_size])
    node = _whole(environ, "SLURM_NODEID")
    if node >= len(tasks):
        raise UserError(f"SLURM_NODEID={node}, but {SRUN.local_size} tells of {len(tasks)} nodes", "the environment", _ONE_LAUNCHER)
    return Placement(_whole(environ, SRUN.rank), _whole(environ, SRUN.size), _whole(environ, SRUN.local_rank), tasks[node], SRUN.name)


def _tasks_per_node(text: str) -> list[int]:
    """ "2(x2),1" -> [2, 2, 1]"""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(f"{SRUN.local_size}={text!r} is not like 2(x2),1", "the environment", _ONE_LAUNCHER)
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _whole(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise UserError(f"{key}={environ[key]!r} is not a whole number", "the environment", _ONE_LAUNCHER) from None


def library_name(version: str) -> str:
    """What MPI_Get_library_version says, without the words that only its builders need."""
    return " ".join(version.replace("\0", "").splitlines()[0].split(",")[0].split())


def check_library(place: Placement, binding: Binding) -> None:
    """Refuses a library that this launcher cannot start, before the library's own start ends the process with a riddle."""
    for launcher in LAUNCHERS:
        if launcher.name == place.launcher and launcher.open_mpi not in (None, "Open MPI" in binding.library):
            raise _apart(place, binding, "uses another MPI library")


def check_size(place: Placement, binding: Binding, size: int) -> None:
    """Refuses an engine that sees other ranks than the launcher started: it would run the same job `size` times.

    Where no launcher that we know told anything, the engine is believed.
    """
    if size != place.size and place.launcher != NO_LAUNCHER.launcher:
        raise _apart(place, binding, "sees only itself (size 1)" if size == 1 else f"sees {size}")


def _apart(place: Placement, binding: Binding, but: str) -> LauncherMismatch:
    fix = _FIRST_TRY.get(place.launcher, "") + binding.fix
    what = f"{place.launcher} started {place.size} processes, but the {binding.engine} engine {but}"
    return LauncherMismatch(what, f"comm.engine={binding.engine}; {binding.library}; the launcher is {place.launcher}", fix)

"""Placement: rank, size, local rank and local size of this process, from its launcher's variables;
and its part of a GPU that is partitioned (MIG)."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.errors import UserError, short


@dataclass(frozen=True)
class Placement:
    """Raises UserError if the numbers contradict each other."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    launcher: str  # the launcher's name, or "none"

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            what = (
                f"rank {self.rank} of {self.size}, local rank {self.local_rank} of "
                f"{self.local_size}: these numbers are impossible"
            )
            raise UserError(what, f"the variables of {self.launcher}", _ONE_LAUNCHER)


class LauncherMismatch(UserError):
    """The engine's library does not see the processes that the launcher started. Every process
    raises it."""


class Launcher(NamedTuple):
    """The variables that a launcher gives each of its processes."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    open_mpi: bool | None = (
        None  # True: starts only Open MPI; False: starts any MPI but Open MPI; None: starts either
    )
    # Other programs set this launcher's variables too: they count only if each of these is set.
    needs: tuple[str, ...] = ()
    nodes: str = ""  # the number of nodes, if no variable gives the local size

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.rank, self.size, self.local_rank, self.nodes or self.local_size)


class EngineLibrary(NamedTuple):
    """The library under an engine."""

    engine: str
    description: str  # "mpi4py uses Open MPI v5.0.11"
    fix: str  # what to do if the launcher does not start this library
    other_library: str = ""  # how the engine gets the library of a launcher of MPI


# In order of precedence. `mpirun` in a batch job leaves SLURM_PROCID=0 on every rank, so srun is
# last. Flux, PALS and jsrun also set variables of PMI or Open MPI, so they come before these.
# Sources: the manuals flux-environment(7), mpiexec(1) of HPE PALS, jsrun(1) of IBM's Job Step
# Manager; mpirun_rsh of MVAPICH2 (its mpispawn.c); the launch.py of DeepSpeed; others were
# recorded.
LAUNCHERS = (
    Launcher(
        "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", nodes="FLUX_JOB_NNODES"
    ),
    Launcher(
        "PALS' mpiexec",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE",
        open_mpi=False,
        needs=("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ),
    # The first releases of PALS have no PALS_LOCAL_SIZE.
    Launcher(
        "PALS' mpiexec",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE",
        open_mpi=False,
        needs=("PALS_LOCAL_RANKID",),
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH2's mpirun_rsh",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        open_mpi=False,
    ),
    Launcher(  # MVAPICH 3 and 4
        "MVAPICH's mpirun_rsh",
        "MVP_COMM_WORLD_RANK",
        "MVP_COMM_WORLD_SIZE",
        "MVP_COMM_WORLD_LOCAL_RANK",
        "MVP_COMM_WORLD_LOCAL_SIZE",
        open_mpi=False,
    ),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        open_mpi=True,
    ),
    Launcher(
        "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
    Launcher(
        "Hydra's mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        open_mpi=False,
    ),
    Launcher(
        "deepspeed",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        needs=("RANK", "WORLD_SIZE", "LOCAL_SIZE"),
    ),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        needs=("RANK", "WORLD_SIZE"),
    ),
)
SRUN = Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
)
# Like srun, it starts programs that may start a launcher, so it only counts if there is no other
# launcher.
SUBMITIT = Launcher(
    "submitit's local executor",
    "SUBMITIT_LOCAL_GLOBALID",
    "SUBMITIT_LOCAL_NTASKS",
    "SUBMITIT_LOCAL_LOCALID",
    "",
    needs=("SUBMITIT_LOCAL_GLOBALID",),
    nodes="SUBMITIT_LOCAL_JOB_NUM_NODES",
)
# launchers that start torch.distributed, without MPI
TORCH_LAUNCHERS = (
    "deepspeed",
    "torchrun",
    SUBMITIT.name,
)
NO_LAUNCHER = Placement(0, 1, 0, 1, "none")

# Launchers that do not report the number of processes, by a variable of each. Without this list
# each process would train alone.
_UNSUPPORTED = {
    "PMIX_RANK": "a launcher of PMIx alone (prterun, prun)",
    "ALPS_APP_PE": "ALPS' aprun",
    "LSF_PM_TASKID": "LSF's blaunch",
    "MPT_LRANK": "HPE MPT's mpirun",
}
# Variables with the number of processes, from launchers that hvdtrain otherwise does not know.
_SIZE = re.compile(r"(\w+_)?WORLD_SIZE|MPI_NRANKS|MPIRUN_N(PROCS|TASKS)|JAX_NUM_PROCESSES")
# `launch` sets it in addition to torchrun's variables, which repeat the variables of its launcher
BY_LAUNCH = "HVDTRAIN_LAUNCH"
_ELASTIC = "TORCHELASTIC_RUN_ID"  # torchrun itself
_ONE_LAUNCHER = "start it with one launcher, from a shell that no other launcher started"
_FIX_OF_MISSING = {  # by the variable of the rank
    "RANK": (
        "torchrun --nproc-per-node N sets all four; or set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 where "
        "each host (or pod) has one process; "
        "or unset RANK and WORLD_SIZE where they are not meant for this job"
    ),
    "PMI_RANK": "mpiexec.hydra (MPICH, Intel MPI), which sets all four; or srun; or "
    "comm.engine=torchdist under torchrun",
    "PALS_RANKID": "mpiexec --pmi=cray, since --pmi=pmix does not set the size; or mpiexec --env "
    "PMI_SIZE=8, the number of all ranks",
}
_FIX_OF_LAUNCHER = {  # before the fix of the engine's library
    "srun": "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); or ",
    "horovodrun": "comm.engine=horovod; or ",
    "torchrun": "comm.engine=torchdist; or ",
    "deepspeed": "comm.engine=torchdist; or ",
    SUBMITIT.name: "comm.engine=torchdist; or ",
    "Flux": "flux run -o pmi=pmix (Open MPI 5) or -o pmi=simple (MPICH); or ",
}
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_FIRST_SPECIAL_STEP = (
    0xFFFFFFF0  # SLURM numbers the batch script, an interactive shell, ... from here on
)


def placement(environ: Mapping[str, str]) -> Placement:
    """Returns the placement that the launcher's variables give; NO_LAUNCHER if there are none.

    Raises UserError if the variables of a launcher are incomplete, two launchers disagree, or the
    launcher is not supported.
    """
    placements: list[Placement] = []
    for launcher in LAUNCHERS:
        if launcher.name == "torchrun" and BY_LAUNCH in environ and _ELASTIC not in environ:
            continue
        placed = _placement_by(launcher, environ, placements)
        if placed is not None:
            placements.append(placed)
    for other in placements[1:]:
        if (other.rank, other.size) != (placements[0].rank, placements[0].size):
            one, two = (
                f"{p.launcher} says rank {p.rank} of {p.size}" for p in (placements[0], other)
            )
            raise UserError(f"{one}, but {two}", "the environment variables", _ONE_LAUNCHER)
    place = (
        placements[0]
        if placements
        else _placement_by_srun(environ) or _placement_by(SUBMITIT, environ, ())
    )
    if place is not None:
        return place
    _refuse_unknown(environ)
    return NO_LAUNCHER


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raises UserError if a launcher started this process without giving it a rank: each of its
    processes would train alone.

    If a launcher has set all of its variables, another MPI's local rank is ignored, because a
    site's script may set it for other programs.
    """
    for launcher in LAUNCHERS:
        missing = [key for key in launcher.variables if key not in environ]
        if len(missing) < len(launcher.variables) and not any(
            key in missing for key in launcher.needs
        ):
            raise _incomplete(launcher, missing)
    supported = (
        "supported: "
        f"{', '.join(dict.fromkeys(launcher.name for launcher in (*LAUNCHERS, SRUN, SUBMITIT)))}"
    )
    for key, name in _UNSUPPORTED.items():
        if key in environ:
            what = (
                f"{name} started this process, which is not supported: it does not report the "
                "number of processes"
            )
            raise UserError(
                what,
                f"the environment: {key}={environ[key]}",
                f"unset {key} if this is the only process; {supported}",
            )
    for key, size in environ.items():
        if _SIZE.fullmatch(key) and size.isdecimal() and int(size) > 1:
            what = (
                f"{key}={size}, but no variable gives the rank of this process: each of the "
                f"{size} ranks would train alone"
            )
            raise UserError(
                what,
                "the environment",
                f"unset {key} if this is the only process; otherwise start all with one launcher, "
                f"{supported}",
            )


def torchrun_variables(place: Placement, node: tuple[int, int] | None) -> dict[str, str]:
    """Returns the variables that torchrun sets, except rank 0's address. node: this node's number
    and the number of nodes, if known."""
    rank = str(place.rank)
    size = str(place.size)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }
    variables |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default"}
    if node is not None:
        variables |= {"GROUP_RANK": str(node[0]), "GROUP_WORLD_SIZE": str(node[1])}
    return variables


def _placement_by(
    launcher: Launcher, environ: Mapping[str, str], earlier: Sequence[Placement]
) -> Placement | None:
    """Returns the placement from one launcher's variables; None if it set none, or if another
    launcher set them.

    `srun --mpi=pmi2` only sets PMI's rank and size; then the placement comes from srun.
    """
    missing = [key for key in launcher.variables if key not in environ]
    if {launcher.rank, launcher.size} <= {*missing} or any(
        key in missing for key in launcher.needs
    ):
        return None
    if missing:
        step = _placement_by_srun(environ)
        if any(
            _agrees(launcher, environ, other) for other in (*earlier, *([step] if step else []))
        ):
            return None
        raise _incomplete(launcher, missing)
    rank, size, local_rank, local_size = (_integer(environ, key) for key in launcher.variables)
    if launcher.nodes:
        local_size = _share_of_node(launcher, size, nodes=local_size)
    return Placement(rank, size, local_rank, local_size, launcher.name)


def _incomplete(launcher: Launcher, missing: Sequence[str]) -> UserError:
    what = f"{launcher.name} set some of its variables, but not {', '.join(missing)}"
    return UserError(what, "the environment", _FIX_OF_MISSING.get(launcher.rank, _ONE_LAUNCHER))


def _share_of_node(launcher: Launcher, size: int, nodes: int) -> int:
    """Returns the local size if all nodes have the same number of processes. Raises UserError if
    they cannot."""
    if nodes < 1 or size % nodes:
        what = (
            f"{launcher.name} started {size} processes on {nodes} nodes, and does not report how "
            "many are on each"
        )
        raise UserError(
            what,
            f"the environment: {launcher.size}={size}, {launcher.nodes}={nodes}",
            "start the same number of processes on each node",
        )
    return size // nodes


def _agrees(launcher: Launcher, environ: Mapping[str, str], other: Placement) -> bool:
    """Whether the variables that a launcher set (its rank, its size, or both) equal another
    launcher's placement."""
    found = [
        (key, number)
        for key, number in ((launcher.rank, other.rank), (launcher.size, other.size))
        if key in environ
    ]
    return bool(found) and all(_integer(environ, key) == number for key, number in found)


def _placement_by_srun(environ: Mapping[str, str]) -> Placement | None:
    """Returns the placement from srun's variables; None in the batch script and in an allocation's
    shell, which are one process each."""
    if SRUN.size not in environ and environ.get(SRUN.rank, "0") != "0":
        raise UserError(
            f"srun set {SRUN.rank}={short(environ[SRUN.rank])}, but not {SRUN.size}",
            "the environment",
            _ONE_LAUNCHER,
        )
    if SRUN.rank not in environ or SRUN.size not in environ:
        return None
    if "SLURM_STEP_ID" in environ and _integer(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    missing = [key for key in (*SRUN.variables, "SLURM_NODEID") if key not in environ]
    if missing:
        raise UserError(
            f"srun set some of its variables, but not {', '.join(missing)}",
            "the environment",
            _ONE_LAUNCHER,
        )
    tasks = tasks_per_node(environ[SRUN.local_size], SRUN.local_size)
    node = _integer(environ, "SLURM_NODEID")
    if node >= len(tasks):
        raise UserError(
            f"SLURM_NODEID={node}, but {SRUN.local_size} lists {len(tasks)} nodes",
            "the environment",
            _ONE_LAUNCHER,
        )
    rank, size, local_rank = (
        _integer(environ, key) for key in (SRUN.rank, SRUN.size, SRUN.local_rank)
    )
    return Placement(rank, size, local_rank, tasks[node], SRUN.name)


def tasks_per_node(text: str, where: str) -> list[int]:
    """Parses SLURM's "2(x2),1" to [2, 2, 1]. Raises UserError for anything else; where: the
    variable's name."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(
                f"{where}={text!r} is not like 2(x2),1", "the environment", _ONE_LAUNCHER
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _integer(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise UserError(
            f"{key}={environ[key]!r} is not a whole number", "the environment", _ONE_LAUNCHER
        ) from None


def library_name(version: str) -> str:
    """Returns name and version from the result of MPI_Get_library_version(): "Open MPI v5.0.11"."""
    return " ".join(version.replace("\0", "").splitlines()[0].split(",")[0].split())


def check_library(place: Placement, library: EngineLibrary) -> None:
    """Raises LauncherMismatch if the launcher cannot start this MPI library. Without this check
    MPI_Init would end the process without an explanation."""
    for launcher in LAUNCHERS:
        # the second is derived from the first
        is_open_mpi = any(name in library.description for name in ("Open MPI", "Spectrum MPI"))
        if launcher.name == place.launcher and launcher.open_mpi not in (None, is_open_mpi):
            raise _mismatch(
                place,
                library._replace(fix="; or ".join(filter(None, library[2:]))),
                "uses another MPI library",
            )


def check_size(place: Placement, library: EngineLibrary, size: int) -> None:
    """Raises LauncherMismatch if the engine's size differs from the launcher's: the same job would
    run several times.

    Without a launcher the engine's size counts.
    """
    if size != place.size and place.launcher != NO_LAUNCHER.launcher:
        raise _mismatch(
            place, library, "sees only itself (size 1)" if size == 1 else f"sees {size}"
        )


def _mismatch(place: Placement, library: EngineLibrary, observation: str) -> LauncherMismatch:
    fix = _FIX_OF_LAUNCHER.get(place.launcher, "") + library.fix
    what = (
        f"{place.launcher} started {place.size} processes, but the {library.engine} engine "
        f"{observation}"
    )
    return LauncherMismatch(
        what,
        f"comm.engine={library.engine}; {library.description}; the launcher is {place.launcher}",
        fix,
    )


def listed_devices(environ: Mapping[str, str], variable: str = VISIBLE_DEVICES) -> list[str] | None:
    """Returns the numbers and UUIDs in the list, up to the first that is not a device, as CUDA
    reads it; None: all devices are visible."""
    listed = environ.get(variable)
    if listed is None:
        return None
    devices: list[str] = []
    for name in (each.strip() for each in listed.split(",")):
        # SLURM's word on nodes without a GPU for the job
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        devices.append(name)
    return devices


def take_part_of_gpu(place: Placement, environ: MutableMapping[str, str]) -> None:
    """Reduces the list to this local rank's entry, if it lists several parts of partitioned GPUs
    ("MIG-...").

    CUDA shows a process only one part, the first in the list: without this, all ranks would train
    on it. Called before CUDA starts.
    """
    names = listed_devices(environ) or []
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        environ[VISIBLE_DEVICES] = names[place.local_rank % len(names)]

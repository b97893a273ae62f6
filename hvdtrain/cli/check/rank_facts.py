"""What one rank knows by itself, without asking the others: where it is, what is installed, what it may use."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain.comm.placement import Placement
from hvdtrain.version import __version__

_PACKAGES = {"torch": "torch", "numpy": "numpy", "Horovod": "horovod", "mpi4py": "mpi4py", "jax": "jax"}
_UNLIMITED = -1


def facts_of(place: Placement, environ: Mapping[str, str]) -> dict[str, Any]:
    """Everything that needs neither engine nor configuration."""
    return {
        "rank": place.rank,
        "size": place.size,
        "local_rank": place.local_rank,
        "local_size": place.local_size,
        "launcher": place.launcher,
        "launcher_mpi": launcher_mpi(environ),
        "host": socket.gethostname(),
        "machine": _read("/proc/sys/kernel/random/boot_id"),
        "container": container(environ),
        "pid": os.getpid(),
        "versions": versions(),
        "code": digest(code_digests()),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1)),
        "host_cores": os.cpu_count() or 1,
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "shared_memory_bytes": _room("/dev/shm"),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "infiniband": _names("/sys/class/infiniband"),
    }


def versions() -> dict[str, str]:
    """Of what must be the same everywhere; what is not installed is left out."""
    found = {"hvdtrain": __version__, "Python": platform.python_version()}
    for name, package in _PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return found


def code_digests() -> dict[str, str]:
    """file -> digest, of hvdtrain's own code."""
    root = Path(__file__).parents[2]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in sorted(root.rglob("*.py"))}


def digest(items: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(items.items())).encode()).hexdigest()[:12]


def launcher_mpi(environ: Mapping[str, str]) -> str:
    """The MPI that started this process, by the variables that it left; empty where none did."""
    if "OMPI_COMM_WORLD_RANK" in environ:
        version = environ.get("OMPI_VERSION")  # since Open MPI 5
        older = any(key.startswith("OMPI_MCA_orte_") for key in environ)
        return f"Open MPI {version}" if version else "Open MPI 4 or older" if older else "Open MPI"
    if "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ:
        return "Intel MPI" if any(key.startswith("I_MPI_HYDRA") for key in environ) else "MPICH"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return "srun with PMIx" if "PMIX_RANK" in environ else "srun with PMI2" if "PMI_RANK" in environ else "srun without PMI"
    return ""


def container(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """What kind of container this process is in; empty on a host."""
    if "APPTAINER_CONTAINER" in environ:
        return "apptainer"
    if "SINGULARITY_CONTAINER" in environ:
        return "singularity"
    if "CH_RUNNING" in environ:
        return "charliecloud"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _room(path: str) -> list[int] | None:
    """[bytes in all, bytes free] of a file system; None where it is not there."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return [found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail]


def _limit(kind: int) -> int:
    """The soft limit; -1 is none."""
    soft = resource.getrlimit(kind)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

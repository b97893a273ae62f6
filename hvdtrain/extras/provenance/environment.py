"""The environment of a job: for the event "start", and environment.json in the run folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.plugins import PACKAGE
from hvdtrain.core.folder import Folder
from hvdtrain.events import redaction
from hvdtrain.events.terminal import warn
from hvdtrain.extras.provenance.repositories import files_of_user, repositories
from hvdtrain.training.replicas.software import variables
from hvdtrain.version import __version__

FILE = "environment.json"
_JOB_VARIABLES = (  # names of the job and of its allocation; other variables may hold secrets
    *("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_PARTITION", "SLURM_CLUSTER_NAME"),
    *("SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE"),
    *("PBS_JOBID", "PBS_QUEUE", "LSB_JOBID", "LSB_QUEUE", "JOB_ID", "FLUX_JOB_ID"),
    *("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_DIST = re.compile(r"(.+?)-([^-]+)\.(?:dist|egg)-info")


def record(run: Path) -> dict[str, Any]:
    """Writes environment.json, and returns its fields for the event "start"."""
    fields = environment_fields()
    write_environment(run, fields)
    return fields


def environment_fields() -> dict[str, Any]:
    """Returns what this process runs with, without the diffs of its code."""
    modules: Mapping[str, ModuleType] = sys.modules
    return {
        "command": _command(sys.argv),
        "folder": os.getcwd(),
        "hvdtrain": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": _gpus(modules),
        "driver": _driver(),
        "torch": _torch_build(modules),
        "mpi": _mpi(modules),
        "launcher": placement(os.environ).launcher,
        "modules": [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
        "variables": {
            name: redaction.redact_urls(value)
            for name, value in {
                **variables(os.environ),
                **{name: os.environ[name] for name in _JOB_VARIABLES if name in os.environ},
            }.items()
        },
        "code": [one.fields() for one in repositories(modules, PACKAGE)],
        "files": files_of_user(modules),
        "packages": packages(modules),
    }


def write_environment(run: Path, found: Mapping[str, Any]) -> None:
    """Writes environment.json: the fields, and the changes of each repository. Warns if it cannot
    be written: the job does not need it."""
    diffs = {one.folder: one.diff for one in repositories(sys.modules, PACKAGE) if one.diff}
    text = json.dumps({**found, "diffs": diffs}, indent=1)
    try:
        with Folder.open(run) as folder:
            folder.replace(FILE, f"{text}\n".encode(errors="replace"))
    except OSError as error:
        warn(f"{run / FILE} is not written: {error.strerror or error}")


def packages(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Returns the version of each imported package, by the name under which it is imported. No
    package is imported or read for it."""
    installed = _installed_versions(tuple(sys.path))
    tops = {name.partition(".")[0] for name in list(modules)} - sys.stdlib_module_names
    found = {}
    for name in sorted(tops):
        version = installed.get(name.lower().replace("_", "-"))
        if version is None:
            version = getattr(modules.get(name), "__version__", None)
        if isinstance(version, str) and not name.startswith("_") and name != PACKAGE.name:
            found[name] = version[:40]
    return found


@functools.cache
def _installed_versions(path: Sequence[str]) -> dict[str, str]:
    """Returns the versions of installed packages by the names of their folders, which the first of
    the path wins."""
    found: dict[str, str] = {}
    for folder in path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if match := _DIST.fullmatch(name):
                    found.setdefault(match[1].lower().replace("_", "-"), match[2])
    return found


def _command(words: Sequence[str]) -> list[str]:
    """Returns the command line with secrets hidden: hub_token=..., --password ..., logins of
    URLs."""
    shown = []
    hides_next = False
    for word in words:
        key, equals, value = word.partition("=")
        is_secret = redaction.is_secret_key(key.lstrip("-"))
        if hides_next and not word.startswith("-"):
            shown.append(redaction.HIDDEN)
        elif equals and is_secret and value:
            shown.append(f"{key}={redaction.HIDDEN}")
        else:
            shown.append(redaction.redact_urls(word))
        hides_next = word.startswith("-") and is_secret and not equals
    return shown


def _cpu() -> str:
    """Returns the model of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus(modules: Mapping[str, Any]) -> list[str]:
    """Returns the names of the GPUs that torch sees, if it is imported and has started them."""
    torch = modules.get("torch")
    if torch is None:
        return []
    return [
        gpus.get_device_properties(number).name
        for gpus in (torch.cuda, getattr(torch, "xpu", None))
        if gpus is not None and gpus.is_initialized()
        for number in range(gpus.device_count())
    ]


def _driver() -> str:
    """Returns the version of the GPU driver."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            return Path(path).read_text(errors="replace").splitlines()[0].strip()
    return ""


def _torch_build(modules: Mapping[str, Any]) -> str:
    """Returns the versions of torch's source, its compiler and its libraries."""
    torch = modules.get("torch")
    if torch is None:
        return ""
    lines = torch.__config__.show().splitlines()
    known = [line.strip(" -") for line in lines if line.startswith("  - ")]
    return "; ".join([f"git {torch.version.git_version}", *known[:-1]])  # the last: compiler flags


def _mpi(modules: Mapping[str, Any]) -> str:
    """Returns the name and version of the MPI library, if this process has loaded it."""
    mpi = modules.get("mpi4py.MPI")
    return "" if mpi is None else mpi.Get_library_version().partition("\n")[0].strip(" \0,")

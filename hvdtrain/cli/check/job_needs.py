"""What a rank finds when it looks at its part of the work: data, device, MPI libraries, and the folders that are written."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvdtrain.cli.check.findings import Finding
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import library_name
from hvdtrain.config import plugins
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError

ROOM_BYTES = 1e9  # of a run folder: a ResNet-50 and its slots, a few times over


def data(config: Config, provenance: Provenance) -> dict[str, Any]:
    """What the job would read, read as the job does; all of it must be equal on all ranks but the seconds."""
    from hvdtrain.train.build import unstaged
    from hvdtrain.train.job import prepare

    began = time.perf_counter()
    parts = prepare(unstaged(config), provenance)
    return {
        "training samples": len(parts.train),
        "validation samples": len(parts.val),
        "image shape": list(parts.task.shape),
        "classes": parts.task.classes,
        "mean of the pixels": parts.task.mean.tolist(),
        "seconds": round(time.perf_counter() - began, 2),
    }


def device(config: Config, provenance: Provenance, communicator: Communicator) -> dict[str, Any]:
    """The device that this rank would train on. What tells one GPU from another is its UUID."""
    if config.framework != "torch":
        return {"name": "cpu" if config.framework == "numpy" else "as JAX chooses", "model": "", "id": "", "bytes": 0, "visible": 0}
    chosen = plugins.load("frameworks", "torch", provenance.where("framework")).pick_device(config, provenance, communicator)
    cuda: Any = sys.modules["torch"].cuda
    if chosen.type != "cuda":
        return {"name": f"{chosen}", "model": "", "id": "", "bytes": 0, "visible": cuda.device_count()}
    told = cuda.get_device_properties(chosen)
    identity = str(getattr(told, "uuid", "")) or f"{chosen}"  # older torch has no uuid
    return {"name": f"{chosen}", "model": told.name, "id": identity, "bytes": told.total_memory, "visible": cuda.device_count()}


def libraries(communicator: Communicator) -> dict[str, Any]:
    """The MPI under mpi4py and under Horovod in this very process, asked after the engine has started; whether Horovod knows NCCL."""
    told: dict[str, Any] = {"mpi4py": None, "horovod": None, "nccl": None}
    from hvdtrain.comm import mpi

    with contextlib.suppress(UserError):  # no mpi4py, or none that finds its library: the horovod and torchdist engines need none
        told["mpi4py"] = library_name(mpi.load().Get_library_version())
    if communicator.name == "horovod":
        from hvdtrain.comm import horovod

        told["horovod"], told["nccl"] = horovod.library(), horovod.has_nccl()
    return told


def run_folder(config: Config, provenance: Provenance) -> tuple[dict[str, Any], list[Finding]]:
    """Of rank 0's host alone, which alone writes there. Nothing is left behind."""
    run = Path(config.run).expanduser() if config.run is not None else Path("runs")
    where = provenance.where("run")
    folder = _existing(run)
    free_bytes = shutil.disk_usage(folder).free
    told: dict[str, Any] = {"folder": str(run), "bytes_free": free_bytes, "locks": None}
    try:
        locks = _locks(folder)
    except OSError as error:
        fix = "give run= a folder that can be written"
        return told, [Finding("error", f"cannot write the run folder {run}: {error.strerror or error}", where, fix)]
    found = []
    if free_bytes < ROOM_BYTES:
        what = f"{free_bytes / 1e9:.2f} GB are free for the run folder {run}"
        found.append(Finding("warning", what, where, "make room; checkpoint.keep_last=1 keeps one checkpoint"))
    return told | {"locks": locks}, found


def cache(place: str) -> list[Finding]:
    """Of one rank on each host: where data sets and built wheels are kept."""
    from hvdtrain.data.files.download import cache_root

    folder = cache_root()
    fix = "XDG_CACHE_HOME=DIR with a folder on a local disk, or data.root=DIR; for a network file system: mount it with locks (flock)"
    try:
        if _locks(_existing(folder)):
            return []
        what = f"file locks do not work in {folder}: two processes could write the same file"
    except OSError as error:
        what = f"cannot write in {folder}: {error.strerror or error}"
    return [Finding("warning", what, place, fix)]


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    while not (os.path.lexists(folder) or folder == folder.parent):
        folder = folder.parent
    return folder


def _locks(folder: Path) -> bool:
    """Whether a lock keeps a second process away from a new file there; an OSError where no file can be made."""
    from filelock import FileLock, Timeout

    handle, name = tempfile.mkstemp(prefix=".hvdtrain-check-", dir=folder)
    os.close(handle)
    try:
        with FileLock(name, timeout=0):
            try:
                with FileLock(name, timeout=0):
                    return False
            except Timeout:
                return True
    except NotImplementedError:  # the file system has none
        return False
    finally:
        Path(name).unlink(missing_ok=True)

"""A rank tries its part of the job without training: reads the data, picks the device, loads the MPI libraries, writes to the folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from hvdtrain.cli.check.findings import Finding
from hvdtrain.cli.check.rank_facts import DeviceFacts, LibraryFacts
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import library_name
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError

FREE_BYTES = 1e9  # that a run folder needs: a few checkpoints of a ResNet-50 with its optimizer state


class RunFolderFacts(TypedDict):
    """The run folder, as rank 0 sees it; in `--json` too."""

    folder: str
    bytes_free: int
    locks: bool | None  # whether file locks work there; None where no file can be written


class RunFolder(NamedTuple):
    facts: RunFolderFacts
    findings: list[Finding]


def read_data(config: Config) -> dict[str, Any]:
    """The data sets, read as the job reads them. All values but the seconds must be equal on all ranks.

    Raises UserError where data are missing or broken.
    """
    from hvdtrain.training.datasets import open_datasets, unstaged

    began = time.perf_counter()
    datasets = open_datasets(unstaged(config))
    return {
        "training samples": len(datasets.train),
        "validation samples": len(datasets.val),
        "image shape": list(datasets.task.shape),
        "classes": datasets.task.classes,
        "mean of the pixels": datasets.task.mean.tolist(),
        "seconds": round(time.perf_counter() - began, 2),
    }


def pick_device(config: Config, communicator: Communicator) -> DeviceFacts:
    """The device that this rank would train on; a GPU is identified by its UUID.

    Raises UserError where speed.device asks for a GPU that is not there.
    """
    if config.framework != "torch":
        name = "cpu" if config.framework == "numpy" else "as JAX chooses"
        return {"name": name, "model": "", "id": "", "bytes": 0, "visible": 0}
    device = plugins.load("frameworks", "torch", config.where("framework")).pick_device(config, communicator)
    cuda: Any = sys.modules["torch"].cuda
    if device.type != "cuda":
        return {"name": str(device), "model": "", "id": "", "bytes": 0, "visible": cuda.device_count()}
    properties = cuda.get_device_properties(device)
    identity = str(getattr(properties, "uuid", "")) or str(device)  # older torch has no uuid
    return {
        "name": str(device),
        "model": properties.name,
        "id": identity,
        "bytes": properties.total_memory,
        "visible": cuda.device_count(),
    }


def load_libraries(communicator: Communicator) -> LibraryFacts:
    """The MPI under mpi4py and under Horovod in this process; called after the engine has started."""
    from hvdtrain.comm import mpi

    found: LibraryFacts = {"mpi4py": None, "horovod": None, "nccl": None}
    with contextlib.suppress(UserError):  # mpi4py or its MPI library is missing: the horovod and torchdist engines need neither
        found["mpi4py"] = library_name(mpi.load().Get_library_version())
    if "horovod_api" in communicator.features:
        from hvdtrain.comm import horovod

        found["horovod"] = horovod.library()
        found["nccl"] = horovod.has_nccl()
    return found


def try_run_folder(config: Config) -> RunFolder:
    """Whether the run folder can be written and has room. Only rank 0 writes there, so only rank 0 calls it. Leaves nothing behind."""
    run = Path(config.run).expanduser() if config.run is not None else Path("runs")
    where = config.where("run")
    folder = _nearest_existing(run)
    free_bytes = shutil.disk_usage(folder).free
    facts: RunFolderFacts = {"folder": str(run), "bytes_free": free_bytes, "locks": None}
    try:
        facts["locks"] = _locks_work(folder)
    except OSError as error:
        what = f"cannot write the run folder {run}: {error.strerror or error}"
        return RunFolder(facts, [Finding("error", what, where, "give run= a folder that can be written")])
    findings = []
    if free_bytes < FREE_BYTES:
        what = f"the run folder {run} has {free_bytes / 1e9:.2f} GB of free space"
        findings.append(Finding("warning", what, where, "free some space; checkpoint.keep_last=1 keeps one checkpoint"))
    return RunFolder(facts, findings)


def try_cache_folder(host: str) -> list[Finding]:
    """Whether the folder for downloaded data and built wheels can be written and locked; one rank of each host calls it."""
    from hvdtrain.data.files.default_folders import cache_root

    folder = cache_root()
    fix = "give XDG_CACHE_HOME= a folder on a local disk, or data.root=DIR; mount a network file system with locks (flock)"
    try:
        if _locks_work(_nearest_existing(folder)):
            return []
        what = f"file locks do not work in {folder}: two processes could write the same file"
    except OSError as error:
        what = f"cannot write in {folder}: {error.strerror or error}"
    return [Finding("warning", what, host, fix)]


def _nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not (os.path.lexists(folder) or folder == folder.parent):
        folder = folder.parent
    return folder


def _locks_work(folder: Path) -> bool:
    """Whether a second lock of a new file there is refused. Raises OSError where no file can be written."""
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
    except NotImplementedError:  # the file system has no locks
        return False
    finally:
        Path(name).unlink(missing_ok=True)

"""The ranks try a job without training: its data, device, libraries and folders, the speed of an
allreduce, and the offsets of clocks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.cores.topology import Topology
from hvdtrain.comm.launcher_variables import Placement, library_name
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import UNFINISHED, Folder
from hvdtrain.errors import UserError
from hvdtrain.extras.check.rank_facts import DeviceFacts, Finding, Level, LibraryFacts, RankFacts
from hvdtrain.training.run_lock import BEAT_S, LOCK, STALE_S, find_holder, in_use

FREE_BYTES = (
    1e9  # bytes that a run folder needs: a few checkpoints of a ResNet-50 with its optimizer state
)


class RunFolderFacts(TypedDict):
    """The run folder, as seen by rank 0; also in `--json`."""

    folder: str
    bytes_free: int
    locks: bool | None  # whether file locks work there; None if no file can be written


class RunFolder(NamedTuple):
    facts: RunFolderFacts
    findings: list[Finding]


def read_data(config: Config) -> dict[str, Any]:
    """Reads the data sets like the job and describes them. All values except the seconds must be
    equal on all ranks.

    Raises UserError if data are missing or broken.
    """
    from hvdtrain.data.configured.unwritten import unstaged
    from hvdtrain.training.data_facts import data_facts
    from hvdtrain.training.datasets import open_datasets

    began = time.perf_counter()
    found = data_facts(config, open_datasets(unstaged(config)))
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def pick_device(config: Config, communicator: Communicator) -> DeviceFacts:
    """Returns the device that this rank would train on; a GPU is identified by its UUID.

    Raises UserError if speed.device requests a GPU that does not exist.
    """
    if config.framework != "torch":
        name = {"numpy": "cpu", "jax": "as JAX chooses"}.get(config.framework, "as Keras chooses")
        return {"name": name, "model": "", "id": "", "bytes": 0, "visible": 0}
    device = plugins.load("frameworks", "torch", config.where("framework")).pick_device(
        config, communicator
    )
    from hvdtrain.frameworks.torch.device import suffix_of_maker  # torch is imported

    torch: Any = sys.modules["torch"]
    gpus = torch.get_device_module(device if device.type != "cpu" else "cuda")
    if device.type == "cpu":
        return {
            "name": str(device),
            "model": "",
            "id": "",
            "bytes": 0,
            "visible": gpus.device_count(),
        }
    properties = gpus.get_device_properties(device)
    # older versions of torch have no uuid
    identity = str(getattr(properties, "uuid", "")) or str(device)
    return {
        "name": str(device),
        "model": properties.name + suffix_of_maker(device),
        "id": identity,
        "bytes": properties.total_memory,
        "visible": gpus.device_count(),
    }


def gpu_cores(config: Config, communicator: Communicator) -> list[int]:
    """Returns the cores next to this rank's GPU; empty on the CPU, and if /sys does not list
    them."""
    from hvdtrain.training.run_rank import gpu_address

    address = gpu_address(config, communicator)
    return list(Topology().near(address)) if address else []


def load_libraries(communicator: Communicator) -> LibraryFacts:
    """Returns the MPI libraries that mpi4py and Horovod use in this process; called after the
    engine has started."""
    from hvdtrain.comm import mpi

    libraries: LibraryFacts = {"mpi4py": None, "horovod": None, "nccl": None}
    with contextlib.suppress(
        UserError
    ):  # mpi4py or its MPI library is missing: the horovod and torchdist engines need neither
        libraries["mpi4py"] = library_name(mpi.load().Get_library_version())
    if "horovod_api" in communicator.features:
        from hvdtrain.comm import horovod

        libraries["horovod"] = horovod.library()
        libraries["nccl"] = horovod.has_nccl()
    return libraries


def try_run_folder(config: Config) -> RunFolder:
    """Whether the run folder can be written and has room. Only rank 0 writes there, so only rank 0
    calls it. Leaves nothing behind."""
    run = Path(config.run).expanduser() if config.run is not None else Path("runs")
    where = config.where("run")
    folder = _nearest_existing(run)
    free_bytes = 0
    facts: RunFolderFacts = {"folder": str(run), "bytes_free": 0, "locks": None}
    try:
        facts["bytes_free"] = free_bytes = shutil.disk_usage(folder).free
        facts["locks"] = _locks_work(folder)
    except OSError as error:
        what = f"cannot write the run folder {run}: {error.strerror or error}"
        return RunFolder(
            facts, [Finding("error", what, where, "give run= a folder that can be written")]
        )
    findings = []
    if free_bytes < FREE_BYTES:
        what = f"the run folder {run} has {free_bytes / 1e9:.2f} GB of free space"
        findings.append(
            Finding(
                "warning",
                what,
                where,
                "free some space; checkpoint.keep_last=1 keeps one checkpoint",
            )
        )
    return RunFolder(facts, [*findings, *_find_other_job(config)])


def _find_other_job(config: Config) -> list[Finding]:
    """Finds another job that holds the lock of the run folder."""
    run = config.run if config.run is not None else config.resume
    try:
        sign = find_holder(Path(run).expanduser(), 1.5 * BEAT_S)
    except OSError:  # the folder does not exist yet
        return []
    if sign is None:
        return []
    where = str(Path(run) / LOCK)
    if sign.alive is False:
        return [
            Finding(
                "note",
                f"{run} was left locked by {sign.holder}, which is gone",
                where,
                "nothing: the next job takes it over",
            )
        ]
    if sign.alive:
        error = in_use(Path(run), sign)
        level: Level = "note" if sign.holder.ending else "error"
        return [
            Finding(
                level,
                error.what,
                where,
                "a job waits for its last checkpoint" if sign.holder.ending else error.fix,
            )
        ]
    what = f"{run} is locked by {sign.holder}, without a sign of life for {sign.silent_s:.0f} s"
    return [
        Finding("warning", what, where, f"a job takes it over after {STALE_S:.0f} s of silence")
    ]


def try_cache_folder(host: str) -> list[Finding]:
    """Checks that the folder for downloaded data and built wheels can be written and locked; one
    rank of each host calls it."""
    from hvdtrain.data.files.folders import cache_root

    folder = cache_root()
    fix = (
        "give XDG_CACHE_HOME= a folder on a local disk, or data.root=DIR; mount a network file "
        "system with locks (flock)"
    )
    try:
        if _locks_work(_nearest_existing(folder)):
            return []
        what = f"file locks do not work in {folder}: two processes could write the same file"
    except OSError as error:
        what = f"cannot write in {folder}: {error.strerror or error}"
    return [Finding("warning", what, host, fix)]


def _nearest_existing(folder: Path) -> Path:
    """Returns the folder, or its nearest existing parent."""
    folder = folder.absolute()
    while not (os.path.lexists(folder) or folder == folder.parent):
        folder = folder.parent
    return folder


def _locks_work(folder: Path) -> bool:
    """Whether a second lock of a new file there is rejected. Raises OSError if no file can be
    written."""
    from hvdtrain.data.files.folders import NO_LOCKS

    name = f".hvdtrain-check-{secrets.token_hex(8)}{UNFINISHED}"
    with Folder.open(folder) as opened, opened.create(name) as first:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with opened.update(name) as second:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                opened.remove(name)


SMALL_BYTES = 8
LARGE_BYTES = 2**24
_SMALL_REPEATS = 21
_LARGE_REPEATS = 5
_BUDGET_S = 1.0  # time for the large allreduces of one engine
SLOW = 0.5  # share of plain MPI's bytes per second; a slower engine is a finding


class AllreduceSpeed(TypedDict):
    """Medians of the slowest rank; also in `--json`."""

    latency_s: float  # of SMALL_BYTES
    seconds: float  # of LARGE_BYTES
    bytes_per_s: float


class Speeds(TypedDict):
    """Speed of the engine and of plain MPI; None if it was not measured. Also in `--json`."""

    engine: AllreduceSpeed | None
    mpi: AllreduceSpeed | None


def no_speeds() -> Speeds:
    return {"engine": None, "mpi": None}


def measure_speeds(communicator: Communicator, facts: RankFacts, place: Placement) -> Speeds:
    """Measures the engine and plain MPI. A collective: every rank calls it."""
    device = _common_device(communicator, facts)
    if communicator.size == 1:
        return no_speeds()
    from hvdtrain.comm.mpi import connect_beside

    plain_mpi = connect_beside(communicator, place)
    engine_speed = measure(communicator, device)
    return {"engine": engine_speed, "mpi": measure(plain_mpi, "cpu") if plain_mpi else None}


class _RankDevice(NamedTuple):
    name: str
    machine: str
    id: str | None


def _common_device(communicator: Communicator, facts: RankFacts) -> str:
    """Returns this rank's GPU if every rank has its own and the engine accepts GPU memory;
    otherwise the CPU. A collective."""
    device = facts["device"]
    name = device["name"] if device else "cpu"
    everyone = communicator.allgather_object(
        (name, facts["machine"] or facts["host"], device["id"] if device else None)
    )
    devices = [_RankDevice(*one) for one in everyone]
    # NCCL rejects two ranks on one GPU
    distinct = len({(other.machine, other.id) for other in devices}) == len(devices)
    on_gpus = all(other.name.startswith(("cuda", "xpu")) for other in devices)
    return name if distinct and on_gpus and "device_memory" in communicator.features else "cpu"


def measure(communicator: Communicator, device: str) -> AllreduceSpeed:
    """Measures an allreduce of 8 bytes and of 16 MiB, in seconds. A collective: every rank calls
    it."""
    latency_s = _median_s(communicator, device, SMALL_BYTES, _SMALL_REPEATS)
    first_s = _median_s(communicator, device, LARGE_BYTES, 1)
    # equal on all ranks, because first_s is
    repeats = max(1, min(_LARGE_REPEATS, int(_BUDGET_S / first_s)))
    seconds = _median_s(communicator, device, LARGE_BYTES, repeats)
    return {"latency_s": latency_s, "seconds": seconds, "bytes_per_s": LARGE_BYTES / seconds}


def _median_s(communicator: Communicator, device: str, size_bytes: int, repeats: int) -> float:
    """Returns the slowest rank's median, on every rank."""
    buffer = _ones(device, size_bytes // 4)
    times = []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        buffer = communicator.allreduce(buffer, f"check.{size_bytes}", "max")
        float(buffer[0])  # the host waits for the device here
        if repeat > 0:  # the first repetition is a warm-up
            times.append(time.perf_counter() - began)
    return float(
        communicator.allreduce(np.array([statistics.median(times)]), "check.slowest", "max")[0]
    )


def _ones(device: str, count: int) -> Any:
    """Returns float32 ones in the memory of the device."""
    if device == "cpu":
        return np.ones(count, np.float32)
    torch: Any = sys.modules["torch"]  # imported by pick_device()
    return torch.ones(count, device=device)


def slow_engine(engine: str, speeds: Speeds) -> list[Finding]:
    """Returns a finding if the engine reduces far fewer bytes per second than plain MPI."""
    ours = speeds["engine"]
    mpi = speeds["mpi"]
    if ours is None or mpi is None or ours["bytes_per_s"] >= SLOW * mpi["bytes_per_s"]:
        return []
    what = (
        f"the {engine} engine reduces {ours['bytes_per_s'] / 1e6:,.0f} MB/s, plain MPI "
        f"{mpi['bytes_per_s'] / 1e6:,.0f} MB/s"
    )
    fix = {
        "horovod": "give Horovod's thread a core (more than one for each rank: --bind-to none); "
        "compare with comm.engine=mpi",
        "torchdist": "host memory goes through Gloo and TCP: use comm.engine=horovod or mpi; GPU "
        "memory goes through NCCL",
    }.get(engine, "compare with comm.engine=mpi")
    return [Finding("warning", what, "an allreduce of 16 MiB over all ranks", fix)]


def read_clocks(communicator: Communicator) -> list[float]:
    """Returns the time of day on every rank, read right after a synchronization: comparable to
    about a millisecond. A collective."""
    communicator.allreduce(np.ones(1, np.float32), "check.clocks")
    return [float(seconds) for seconds in communicator.allgather_object(time.time())]

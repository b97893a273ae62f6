"""How fast the ranks' engine does an allreduce, how fast MPI alone does it, and how far apart the clocks of the hosts are."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple, TypedDict

import numpy as np

from hvdtrain.cli.check.findings import Finding
from hvdtrain.cli.check.rank_facts import RankFacts
from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.errors import UserError

SMALL_BYTES = 8
LARGE_BYTES = 2**24
_SMALL_REPEATS = 21
_LARGE_REPEATS = 5
_BUDGET_S = 1.0  # of one engine's large allreduces
SLOW = 0.5  # of plain MPI's bytes a second: a slower engine is a finding


class AllreduceSpeed(TypedDict):
    """Medians of the slowest rank; in `--json` too."""

    latency_s: float  # of SMALL_BYTES
    seconds: float  # of LARGE_BYTES
    bytes_per_s: float


class Speeds(TypedDict):
    """Speed of the engine and of plain MPI beside it; None where it was not measured. In `--json` too."""

    engine: AllreduceSpeed | None
    mpi: AllreduceSpeed | None


def no_speeds() -> Speeds:
    return {"engine": None, "mpi": None}


def measure_speeds(communicator: Communicator, facts: RankFacts, place: Placement) -> Speeds:
    """The speed of the engine and of plain MPI. A collective: every rank calls it."""
    device = _common_device(communicator, facts)
    if communicator.size == 1:
        return no_speeds()
    mpi = plain_mpi(communicator, place)
    engine_speed = measure(communicator, device)
    return {"engine": engine_speed, "mpi": measure(mpi, "cpu") if mpi else None}


class _RankDevice(NamedTuple):
    name: str
    machine: str
    id: str | None


def _common_device(communicator: Communicator, facts: RankFacts) -> str:
    """This rank's GPU where every rank has its own and the engine takes GPU memory; else the CPU. A collective."""
    device = facts["device"]
    name = device["name"] if device else "cpu"
    everyone = communicator.allgather_object((name, facts["machine"] or facts["host"], device["id"] if device else None))
    devices = [_RankDevice(*one) for one in everyone]
    distinct = len({(other.machine, other.id) for other in devices}) == len(devices)  # NCCL refuses two ranks on one GPU
    on_gpus = all(other.name.startswith("cuda") for other in devices)
    return name if distinct and on_gpus and "device_memory" in communicator.features else "cpu"


def measure(communicator: Communicator, device: str) -> AllreduceSpeed:
    """Seconds of an allreduce of 8 bytes and of 16 MiB. A collective: every rank calls it."""
    latency_s = _median_s(communicator, device, SMALL_BYTES, _SMALL_REPEATS)
    first_s = _median_s(communicator, device, LARGE_BYTES, 1)
    repeats = max(1, min(_LARGE_REPEATS, int(_BUDGET_S / first_s)))  # equal on all ranks, as first_s is
    seconds = _median_s(communicator, device, LARGE_BYTES, repeats)
    return {"latency_s": latency_s, "seconds": seconds, "bytes_per_s": LARGE_BYTES / seconds}


def _median_s(communicator: Communicator, device: str, size_bytes: int, repeats: int) -> float:
    """The slowest rank's median, on every rank."""
    buffer = _ones(device, size_bytes // 4)
    times = []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        buffer = communicator.allreduce(buffer, f"check.{size_bytes}", "max")
        float(buffer[0])  # the host waits for the device here
        if repeat > 0:  # the first one warms up
            times.append(time.perf_counter() - began)
    return float(communicator.allreduce(np.array([statistics.median(times)]), "check.slowest", "max")[0])


def _ones(device: str, count: int) -> Any:
    """float32, in the memory of the device."""
    if not device.startswith("cuda"):
        return np.ones(count, np.float32)
    torch: Any = sys.modules["torch"]  # imported by pick_device()
    return torch.ones(count, device=device)


def plain_mpi(communicator: Communicator, place: Placement) -> Communicator | None:
    """MPI beside an engine that is not MPI: on every rank, or None on every rank. A collective."""
    if "several_ranks" not in communicator.features or "plain_mpi" in communicator.features:
        return None
    return _connect_mpi(communicator, place) if all(communicator.allgather_object(_mpi_is_usable())) else None


def _mpi_is_usable() -> bool:
    """Whether MPI runs in this process with MPI_THREAD_MULTIPLE: Horovod calls it from a thread of its own."""
    from hvdtrain.comm import mpi

    try:
        loaded = mpi.load()
    except UserError:
        return False
    return bool(loaded.Is_initialized() and not loaded.Is_finalized() and loaded.Query_thread() == loaded.THREAD_MULTIPLE)


def _connect_mpi(communicator: Communicator, place: Placement) -> Communicator | None:
    from hvdtrain.comm import mpi

    connected: Communicator = mpi.connect(place)
    return connected if connected.size == communicator.size else None


def slow_engine(engine: str, speeds: Speeds) -> list[Finding]:
    """A finding where the engine reduces much fewer bytes a second than plain MPI."""
    ours, mpi = speeds["engine"], speeds["mpi"]
    if ours is None or mpi is None or ours["bytes_per_s"] >= SLOW * mpi["bytes_per_s"]:
        return []
    what = f"the {engine} engine reduces {ours['bytes_per_s'] / 1e6:,.0f} MB/s, plain MPI {mpi['bytes_per_s'] / 1e6:,.0f} MB/s"
    fix = {
        "horovod": "give Horovod's thread a core (more than one for each rank: --bind-to none); compare with comm.engine=mpi",
        "torchdist": "host memory goes through Gloo and TCP: use comm.engine=horovod or mpi; GPU memory goes through NCCL",
    }.get(engine, "compare with comm.engine=mpi")
    return [Finding("warning", what, "an allreduce of 16 MiB over all ranks", fix)]


def read_clocks(communicator: Communicator) -> list[float]:
    """The time of day on every rank, read right after a synchronization: comparable to about a millisecond. A collective."""
    communicator.allreduce(np.ones(1, np.float32), "check.clocks")
    return [float(seconds) for seconds in communicator.allgather_object(time.time())]

"""How fast the ranks' engine adds up numbers, and how fast MPI alone does it; how far apart the clocks of the hosts are."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.errors import UserError

SMALL_BYTES, LARGE_BYTES = 8, 2**24
_SMALL, _LARGE = 21, 5  # repetitions
_BUDGET_S = 1.0  # of one engine's large ones


def measure(communicator: Communicator, device: str) -> dict[str, float]:
    """Seconds of an allreduce of 8 bytes and of 16 MiB: the slowest rank's median. Every rank calls it."""
    told = {"latency_s": _median_s(communicator, device, SMALL_BYTES, _SMALL)}
    first_s = _median_s(communicator, device, LARGE_BYTES, 1)
    turns = max(1, min(_LARGE, int(_BUDGET_S / first_s)))  # the same on every rank, for first_s is
    told["seconds"] = _median_s(communicator, device, LARGE_BYTES, turns)
    told["bytes_per_s"] = LARGE_BYTES / told["seconds"]
    return told


def _median_s(communicator: Communicator, device: str, size_bytes: int, turns: int) -> float:
    buffer = _buffer(device, size_bytes // 4)
    times = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        buffer = communicator.allreduce(buffer, f"check.{size_bytes}", "max")
        float(buffer[0])  # the host waits for the device here
        times.append(time.perf_counter() - began)
        if turn == 0:
            times.clear()  # warm-up
    return float(communicator.allreduce(np.array([statistics.median(times)]), "check.slowest", "max")[0])


def _buffer(device: str, numbers: int) -> Any:
    if not device.startswith("cuda"):
        return np.ones(numbers, np.float32)
    torch: Any = sys.modules["torch"]  # that chose the device
    return torch.ones(numbers, device=device)


def plain_mpi(communicator: Communicator, place: Placement) -> Communicator | None:
    """MPI alone beside the engine, on every rank or on none: where the engine itself runs on MPI, through the same library."""
    if communicator.name in ("single", "mpi"):
        return None
    return _mpi(communicator, place) if all(communicator.allgather_object(_can_speak())) else None


def _can_speak() -> bool:
    """Whether MPI runs in this process, for more than one thread: Horovod has one of its own."""
    from hvdtrain.comm import mpi

    try:
        loaded = mpi.load()
    except UserError:
        return False
    return bool(loaded.Is_initialized() and not loaded.Is_finalized() and loaded.Query_thread() == loaded.THREAD_MULTIPLE)


def _mpi(communicator: Communicator, place: Placement) -> Communicator | None:
    from hvdtrain.comm import mpi

    beside: Communicator = mpi.connect(place)
    return beside if beside.size == communicator.size else None


def clocks(communicator: Communicator) -> list[float]:
    """The time of day on every rank, read as soon as all have met: true to about a millisecond."""
    communicator.allreduce(np.ones(1, np.float32), "check.clocks")
    return [float(seconds) for seconds in communicator.allgather_object(time.time())]

"""What a job took of each rank's memory, beside what was predicted."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.errors import UserError
from hvdtrain.frameworks.footprint import Footprint
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.memory.advice import advice
from hvdtrain.training.memory.forecast import MARGIN, MemoryForecast, gib
from hvdtrain.training.memory.room import Room
from hvdtrain.training.telemetry.memory import peak_memory_bytes

LEAST_WEIGHTS = 2**20  # numbers; a job with fewer is not predicted: that takes a second, and 80 MB of libraries


class MemoryMeter:
    """Measures the memory of one rank. Made before the model is; begin() before the first step, end() after the last one."""

    def __init__(self, forecast: MemoryForecast, room: Room) -> None:
        self._forecast, self._room = forecast, room
        self._base_bytes = resident_bytes()  # the interpreter, the libraries and the data set
        self._private_base_bytes = self._base_bytes - shared_bytes()
        self.predicted: Footprint | None = None  # on rank 0
        self.note = ""  # for the header: what is predicted; why it is not
        self.warning = ""

    def begin(self, learner: Learner, weights: int, rank: int) -> None:
        """The model is in place; `weights`: the numbers that are trained. Rank 0 predicts, where the model is not small."""
        if rank == 0 and weights >= LEAST_WEIGHTS:
            before, private = resident_bytes(), resident_bytes() - shared_bytes()
            self._predict(on_gpu=learner.gpu() is not None)
            self._base_bytes += max(0, resident_bytes() - before)  # of what predicts
            self._private_base_bytes += max(0, resident_bytes() - shared_bytes() - private)
        forget_peak()

    def _predict(self, on_gpu: bool) -> None:
        try:
            self.predicted = self._forecast.footprint()
            needs = _needs(self.predicted, on_gpu)
            self.note = f"{gib(needs)} of each rank by prediction, {gib(self._room.bytes)} is there ({self._room.limit})"
            if MARGIN * needs > self._room.bytes:
                self.warning = f"memory may not be enough: {advice(self._forecast, self._room)}"
        except UserError as error:
            self.note = f"not predicted: {error.what}"

    def end(self, learner: Learner, communicator: Communicator) -> dict[str, Any]:
        """Fields of the events "end" and "stop". A collective."""
        gpu = learner.gpu()
        own = gpu.peak_bytes() if gpu else max(0, peak_memory_bytes() - shared_bytes() - self._private_base_bytes)
        peaks, bases = zip(*communicator.allgather_object((own, self._base_bytes)), strict=True)
        fields = {"rank_memory_mb": [round(peak / 1e6, 3) for peak in peaks], "memory_base_mb": round(max(bases) / 1e6, 3)}
        if self.predicted is not None:
            fields["memory_predicted_mb"] = round(_needs(self.predicted, gpu is not None) / 1e6, 3)
        return fields


def line(fields: dict[str, Any]) -> str:
    """memory   1.95 GiB at most on a rank, 1.90 GiB predicted (+2.6 %), beside 0.31 GiB of libraries and data"""
    measured, predicted = 1e6 * fields["rank_memory_mb"][0], 1e6 * fields.get("memory_predicted_mb", 0.0)
    most = 1e6 * max(fields["rank_memory_mb"])
    beside = f"beside {gib(1e6 * fields['memory_base_mb'])} of libraries and data"
    if not predicted:
        return f"memory   {gib(most)} at most on a rank, {beside}"
    return f"memory   {gib(most)} at most on a rank, {gib(predicted)} predicted ({measured / predicted - 1:+.1%} on rank 0), {beside}"


def _needs(predicted: Footprint, on_gpu: bool) -> int:
    """A GPU does not hold what is copied for checkpoints and lost ranks."""
    return predicted.total - (predicted.checkpoint + predicted.copies) * on_gpu


def resident_bytes() -> int:
    """Resident bytes of this process now; 0 where the system does not tell."""
    found = re.search(r"^VmRSS:\s*(\d+) kB$", _status(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def shared_bytes() -> int:
    """Resident bytes of files and of memory shared with other ranks: libraries come in as they are used, and can go."""
    return sum(1024 * int(size) for size in re.findall(r"^Rss(?:File|Shmem):\s*(\d+) kB$", _status(), re.MULTILINE))


def forget_peak() -> None:
    """peak_memory_bytes() then counts from now on, where the system allows that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status() -> str:
    try:
        return Path("/proc/self/status").read_text()
    except OSError:
        return ""

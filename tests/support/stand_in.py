"""Rank 0 of a job whose other ranks do not exist: what it receives, holds and does in each phase.

python tests/support/stand_in.py [RANKS ...]
"""

from __future__ import annotations

import pickle
import socket
import sys
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Buffer, CompletedHandle, Handle, Op
from hvdtrain.config.read import configure
from hvdtrain.frameworks.torch.planned_communicator import PlannedCommunicator
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.run_lock.lock import RunLock
from hvdtrain.training.train_job import train_job

RANKS_OF_HOST = 8
WORDS = ["framework=numpy", "model.name=linear", "batch.size=16384", "recipe.schedule=constant", "log.every_steps=1", "stop.steps=3"]
WORDS += ["data.name=synthetic", "data.shape=[2,2,1]", "data.samples=65536", "data.val_samples=16384"]


@dataclass
class Counts:
    """What rank 0 does in one phase."""

    collectives: int = 0
    received_bytes: int = 0
    processor_s: float = 0.0


class Phases(Heartbeat):
    """Counts by the phase that the main thread is in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: defaultdict[str, Counts] = defaultdict(Counts)
        self._began_s = time.thread_time()

    def beat(self, phase: str, epoch: int, step: int) -> None:
        now_s = time.thread_time()
        self.counts[self.phase].processor_s += now_s - self._began_s
        self._began_s = now_s
        super().beat(phase, epoch, step)

    def receive(self, nbytes: int) -> None:
        counts = self.counts[self.phase]
        counts.collectives += 1
        counts.received_bytes += nbytes


class StandIn(PlannedCommunicator):
    """Rank 0 of `size`; the others give what it gives, from hosts of their own."""

    name = "mpi"

    def __init__(self, size: int, phases: Phases) -> None:
        super().__init__(size, frozenset({"several_ranks"}))
        self.local_size, self._phases = min(size, RANKS_OF_HOST), phases

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        self._phases.receive(x.nbytes)
        return x * self.size if op == "sum" else x

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return CompletedHandle(self.allreduce(x, name, op))

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        self._phases.receive(0)
        return x

    def allgather(self, x: Buffer, name: str) -> Buffer:
        self._phases.receive((self.size - 1) * x.nbytes)
        return np.concatenate([x] * self.size)

    def allgather_object(self, thing: Any) -> list[Any]:
        packed = pickle.dumps(thing)
        self._phases.receive((self.size - 1) * len(packed))
        hosts = [f"host{rank // RANKS_OF_HOST}" for rank in range(self.size)]
        return [host if thing == socket.gethostname() else pickle.loads(packed) for host in hosts]

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        self._phases.receive(0)
        return thing


def phases_of(size: int, run: Path, words: Sequence[str] = WORDS) -> dict[str, Counts]:
    """Of a job that connects, trains and writes its last checkpoint, as rank 0 of `size`."""
    heartbeat = Phases()
    communicator = StandIn(size, heartbeat)
    config = resolve_batch_size(configure(None, [*words, f"run={run}"]), size)
    with (
        Signals(0) as signals,
        RunLock(heartbeat, signals, None) as lock,
        Watchdog(heartbeat, signals, config.guard, 0, lock.release) as watchdog,
    ):
        heartbeat.beat("connecting the ranks", 0, 0)
        watchdog.attach(communicator)
        heartbeat.beat("reading the data", 0, 0)
        datasets = open_datasets(config, communicator)
        train_job(config, datasets, communicator, "a stand-in", signals, heartbeat, lock, None, watchdog)
        heartbeat.beat("", 0, 0)
    return dict(heartbeat.counts)


def print_phases(size: int) -> None:
    """Twice: what is imported in the first run counts for no number of ranks. Memory with tracemalloc, which takes time, in a third one."""
    with tempfile.TemporaryDirectory() as folder:
        phases_of(size, Path(folder) / "first")
        counts = phases_of(size, Path(folder) / "second")
        tracemalloc.start()
        phases_of(size, Path(folder) / "third")
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print(f"{size} ranks: Python's memory {peak_bytes / 1e6:.1f} MB at most", file=sys.stderr)
    for phase, of in counts.items():
        line = f"{size:6} {phase:40} {of.collectives:5} collectives {of.received_bytes:12,} bytes {of.processor_s:8.3f} s of a processor"
        print(line, file=sys.stderr)


if __name__ == "__main__":
    for word in sys.argv[1:] or ("8", "64", "8192"):
        print_phases(int(word))

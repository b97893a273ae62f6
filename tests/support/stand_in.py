"""Rank 0 of a job, of a check and of a checkpoint that ranks write together, whose other ranks do
not exist: what it receives and does.

python tests/support/stand_in.py [RANKS ...]
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
import tempfile
import threading
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
from hvdtrain.core.arrays import whole
from hvdtrain.core.folder import Folder
from hvdtrain.core.progress import Progress
from hvdtrain.frameworks.torch.planned import PlannedCommunicator
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.shards import (
    WORD,
    CheckpointShard,
    ChunkShare,
    WrittenByAll,
    of_read,
    of_written,
)
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.run_lock import RunLock
from hvdtrain.training.train_job import train_job

RANKS_OF_HOST = 8
WORDS = [
    "framework=numpy",
    "model.name=linear",
    "batch.size=16384",
    "recipe.schedule=constant",
    "log.every_steps=1",
    "stop.steps=3",
]
WORDS += [
    "data.name=synthetic",
    "data.shape=[2,2,1]",
    "data.samples=65536",
    "data.val_samples=16384",
]


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
    """Rank 0 of `size`; the other ranks, on other hosts, contribute the same values."""

    name = "mpi"

    def __init__(self, size: int, phases: Phases) -> None:
        super().__init__(size, frozenset({"several_ranks"}))
        self.local_size = min(size, RANKS_OF_HOST)
        self._phases = phases

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
    """Returns the counts by phase of a job that connects, trains and writes its last checkpoint, as
    rank 0 of `size`."""
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
        train_job(
            config, datasets, communicator, "a stand-in", signals, heartbeat, lock, None, watchdog
        )
        heartbeat.beat("", 0, 0)
    return dict(heartbeat.counts)


class OtherWriters(threading.Thread):
    """All ranks but 0 of a checkpoint: each reports what a rank does that has no part of the small
    state, and reads its share."""

    def __init__(self, parts: CheckpointShard, size: int, folder: Path) -> None:
        super().__init__()
        self._parts = parts
        self._size = size
        self._folder = folder
        self.reported_bytes = 0

    def run(self) -> None:
        while not self._folder.exists():
            time.sleep(0.01)
        with Folder.open(self._folder) as folder:
            for rank in range(1, self._size):
                self._report(of_written(rank), {"sums": [(0, 0)] * len(self._parts.layout.sizes)})
            while folder.status(WORD) is None:
                time.sleep(0.01)
            for rank in range(1, self._size):
                share = ChunkShare(self._parts.layout.sizes, rank, self._size).read(
                    folder, lambda: None
                )
                self._report(
                    of_read(rank), {"sums": list(share.sums.values()), "checksums": share.checksums}
                )

    def _report(self, name: str, report: dict[str, Any]) -> None:
        text = json.dumps(report)
        unfinished = self._folder / f".{name}"
        unfinished.write_text(text)
        unfinished.rename(self._folder / name)
        self.reported_bytes += len(text)


def checkpoint_of(size: int, run: Path) -> Counts:
    """Returns the counts by phase of a checkpoint that `size` ranks write together. Collectives
    include checks of the folder and reports that are read."""
    run.mkdir()
    name = files.unfinished_name(3, "0123456789abcdef")
    state = {"p.w": np.arange(1000.0), "s.w.0": np.arange(1000.0)}
    pieces = [
        whole("p.w", state["p.w"]),
        whole("s.w.0", state["s.w.0"])._replace(shape=(1000,), is_whole=False, is_mine=True),
    ]
    parts = CheckpointShard(pieces, files.ARRAYS, files.file_of, 0)
    others = OtherWriters(parts, size, run / "checkpoints" / name)
    others.start()
    began_s = time.thread_time()
    written = WrittenByAll(
        parts, range(1, size), [f"host{rank // RANKS_OF_HOST}" for rank in range(size)], name
    )
    files.write(run, TrainState(Progress(10, 100, 3, 24)), written, {})
    others.join()
    return Counts(0, others.reported_bytes, time.thread_time() - began_s)


def print_phases(size: int) -> None:
    """Runs everything twice, so that imports in the first run do not count for any number of ranks.
    A third run measures memory with tracemalloc, which takes time."""
    from stand_in_of_check import check_of

    with tempfile.TemporaryDirectory() as folder:
        phases_of(size, Path(folder) / "first")
        counts = phases_of(size, Path(folder) / "second")
        check_of(size, Path(folder) / "checked first")
        counts["check"], _ = check_of(size, Path(folder) / "checked")
        counts["a checkpoint of ranks with parts"] = checkpoint_of(size, Path(folder) / "written")
        tracemalloc.start()
        phases_of(size, Path(folder) / "third")
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print(f"{size} ranks: Python's memory {peak_bytes / 1e6:.1f} MB at most", file=sys.stderr)
    for phase, of in counts.items():
        line = (
            f"{size:6} {phase:40} {of.collectives:5} collectives {of.received_bytes:12,} bytes "
            f"{of.processor_s:8.3f} s of a processor"
        )
        print(line, file=sys.stderr)


if __name__ == "__main__":
    for word in sys.argv[1:] or ("8", "64", "8192"):
        print_phases(int(word))

"""Data-parallel steps whose batches come from one storage that all ranks share, with a limit of its
rate and without: started by lab.py on 1 to 8 ranks.

python scaling.py OUT.json STEPS RATE     RATE: bytes/s of the storage

The accelerator is emulated: its rank sleeps while it "computes", as a host does that waits for a
GPU. So 8 ranks on 2 cores take no core from each other. All else is real: the bytes that a rank
reads, the limit, the thread that reads ahead, and the sum of the gradients.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from storage import NOTHING_TAKEN, Storage

WORLD = MPI.COMM_WORLD
BATCH_BYTES = 32 * 110_000  # of a rank: 32 images of ImageNet, as JPEG
COMPUTE_S = 0.1  # with a batch: 320 images/s, which is a ResNet-50 on a GPU of 2017
GRADIENTS = 250_000  # float32
AHEAD = 2  # batches that are read before they are needed
UNCOUNTED = AHEAD + 1  # first steps, whose batches were read before the clock started
POLL_S = 0.0005


def step_s(storage: Storage, steps: int) -> float:
    """The median time of a step; the same on all ranks, since they wait for each other."""
    batches: queue.Queue[bytes] = queue.Queue(AHEAD)

    def read_ahead() -> None:
        for step in range(UNCOUNTED + steps):
            position = (step * WORLD.size + WORLD.rank) * BATCH_BYTES
            batches.put(storage.read(BATCH_BYTES, position))

    reader = threading.Thread(target=read_ahead)
    gradients = np.ones(GRADIENTS, np.float32)
    total = np.empty_like(gradients)
    WORLD.Barrier()
    reader.start()
    stamps = []
    for _ in range(UNCOUNTED + steps):
        batches.get()
        time.sleep(COMPUTE_S)
        request = WORLD.Iallreduce(gradients, total)
        while not request.Test():
            time.sleep(POLL_S)  # MPI's own wait would take a core from the readers
        stamps.append(time.monotonic())
    reader.join()
    assert total[0] == WORLD.size, total[0]
    return float(np.median(np.diff(stamps[UNCOUNTED - 1 :])))


def main() -> None:
    out = Path(sys.argv[1])
    steps = int(sys.argv[2])
    rate = float(sys.argv[3])
    data = out.with_suffix(".data")
    limit = out.with_suffix(".limit")
    if WORLD.rank == 0:
        data.write_bytes(os.urandom(8 * BATCH_BYTES))
        limit.write_bytes(NOTHING_TAKEN)
    WORLD.Barrier()
    found = {
        name: step_s(Storage(data, limit, of), steps)
        for name, of in (("unlimited", float("inf")), ("limited", rate))
    }
    WORLD.Barrier()
    if WORLD.rank == 0:
        data.unlink()
        limit.unlink()
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

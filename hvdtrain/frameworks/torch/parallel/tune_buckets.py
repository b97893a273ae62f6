"""comm.tune: the size of gradient buckets, from a short measurement between these ranks."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.parallel.buckets import group
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, reduction_device

SIZES_MB = (0.5, 1, 2, 4, 8, 16, 32, 64)
ROUNDS = 5
CLOSE = 1.1  # among sizes that are this near to the fastest the smallest wins: its first bucket starts earliest in backward


class Tuned(NamedTuple):
    bucket_bytes: int
    seconds: float  # that the reduction of all buckets of this size takes


def fastest_bucket_bytes(named: NamedParameters, communicator: Communicator, compressed: torch.dtype | None) -> Tuned:
    """The smallest of the fast sizes: the buckets of each size in turn are all started, then waited for, and the slowest rank counts.

    Every rank calls it, and gets the same.
    """
    counts_of = {mb: [sum(p.numel() for p in bucket) for bucket in group(named, int(mb * 2**20))] for mb in SIZES_MB}
    sizes = [mb for i, mb in enumerate(SIZES_MB) if counts_of[mb] not in [counts_of[less] for less in SIZES_MB[:i]]]
    first = named[0][1]
    device, dtype = reduction_device(first.device, communicator), compressed or first.dtype
    times = np.full((len(sizes), ROUNDS), np.inf)
    for turn in range(-1, ROUNDS):  # the first turn warms up
        for i, mb in enumerate(sizes):
            buffers = [torch.zeros(n, dtype=dtype, device=device) for n in counts_of[mb]]
            communicator.allreduce(np.zeros(1), "tune.begin")
            began = time.perf_counter()
            for handle in [communicator.start_allreduce(flat, f"tune.{i}.{j}") for j, flat in enumerate(buffers)]:
                handle.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= 0:
                times[i, turn] = time.perf_counter() - began
    seconds = np.median(communicator.allreduce(times, "tune.times", "max"), axis=1)
    best = int(np.flatnonzero(seconds <= CLOSE * seconds.min())[0])
    return Tuned(int(sizes[best] * 2**20), float(seconds[best]))

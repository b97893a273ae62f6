"""comm.tune: the size of gradient buckets, from a short measurement between these ranks."""

from __future__ import annotations

import time

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.parallel.buckets import group
from hvdtrain.frameworks.torch.parallel.strategy import Named, reduction_device

SIZES_MB = (0.5, 1, 2, 4, 8, 16, 32, 64)
ROUNDS = 5
CLOSE = 1.1  # among sizes that are this near to the fastest the smallest wins: its first bucket starts earliest in backward


def fastest_bucket_bytes(named: Named, communicator: Communicator, wire: torch.dtype | None) -> tuple[int, str]:
    """(bytes, words for the user): all buckets are started, then waited for, at each size by turns; the slowest rank counts."""
    cuts = {mb: [sum(p.numel() for p in some) for some in group(named, int(mb * 2**20))] for mb in SIZES_MB}
    sizes = [mb for i, mb in enumerate(SIZES_MB) if cuts[mb] not in [cuts[less] for less in SIZES_MB[:i]]]  # a small model has few ways
    plans = [cuts[mb] for mb in sizes]
    first = named[0][1]
    place, dtype = reduction_device(first.device, communicator), wire or first.dtype
    times = np.full((len(plans), ROUNDS), np.inf)
    for turn in range(-1, ROUNDS):  # the first turn warms up
        for i, counts in enumerate(plans):
            buffers = [torch.zeros(n, dtype=dtype, device=place) for n in counts]
            communicator.allreduce(np.zeros(1), "tune.begin")
            began = time.perf_counter()
            for handle in [communicator.start_allreduce(flat, f"tune.{i}.{j}") for j, flat in enumerate(buffers)]:
                handle.wait()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            if turn >= 0:
                times[i, turn] = time.perf_counter() - began
    seconds = np.median(communicator.allreduce(times, "tune.times", "max"), axis=1)
    best = int(np.flatnonzero(seconds <= CLOSE * seconds.min())[0])
    return int(sizes[best] * 2**20), f" of {sizes[best]:g} MiB, as tuned ({1e3 * seconds[best]:.2g} ms for all)"

"""Sums of all ranks, by one allreduce."""

from __future__ import annotations

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums


def allreduce_sums(communicator: Communicator, sums: Sums, name: str) -> Sums:
    """The sums over all ranks: floats, and of a float64 array (n,) another one. The host waits for the device here."""
    keys = sorted(sums)
    parts = [part if isinstance(part := sums[key], np.ndarray) else np.array([float(part)]) for key in keys]
    whole = communicator.allreduce(np.concatenate(parts), name)
    split = np.split(whole, np.cumsum([len(part) for part in parts])[:-1])
    return {key: total if isinstance(sums[key], np.ndarray) else float(total[0]) for key, total in zip(keys, split, strict=True)}

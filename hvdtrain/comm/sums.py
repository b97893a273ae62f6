"""Sums over all ranks by one allreduce."""

from __future__ import annotations

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums


def allreduce_sums(communicator: Communicator, sums: Sums, name: str) -> Sums:
    """The sums over all ranks, which have the same keys: a float, or for a float64 array (n,) an array. The host waits for the device."""
    keys = sorted(sums)
    arrays = [value if isinstance(value := sums[key], np.ndarray) else np.array([float(value)]) for key in keys]
    total = communicator.allreduce(np.concatenate(arrays), name)
    totals = np.split(total, np.cumsum([len(array) for array in arrays])[:-1])
    return {key: one if isinstance(sums[key], np.ndarray) else float(one[0]) for key, one in zip(keys, totals, strict=True)}

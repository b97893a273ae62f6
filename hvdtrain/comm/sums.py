"""Sums over all ranks by one allreduce."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums, host_value


def allreduce_sums(communicator: Communicator, sums: Sums, name: str, lengths: Mapping[str, int] | None = None) -> Sums:
    """The sums over all ranks, which have the same keys: a float, or of a vector a float64 array (n,). The host waits for the device.

    lengths: of vectors, by name, so that a rank without samples, where it is one 0, sends as many numbers as the others; 0: no vector.
    """
    keys, arrays = sorted(sums), []
    for key in keys:
        array = np.atleast_1d(np.asarray(host_value(sums[key]), np.float64))
        length = (lengths or {}).get(key, 0)
        arrays.append(np.broadcast_to(array, length) if length else array)
    total = communicator.allreduce(np.concatenate(arrays), name)
    totals = np.split(total, np.cumsum([len(array) for array in arrays])[:-1])
    is_vector = {key: bool((lengths or {}).get(key, 0)) or isinstance(sums[key], np.ndarray) for key in keys}
    return {key: one if is_vector[key] else float(one[0]) for key, one in zip(keys, totals, strict=True)}

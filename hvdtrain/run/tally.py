"""Sums over samples, {"loss", "right", "count"} and more: added up over steps on the device, and over ranks by one allreduce."""

from __future__ import annotations

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.state import Sums


def zero() -> Sums:
    return {"loss": 0.0, "right": 0.0, "count": 0}


def add(a: Sums, b: Sums) -> Sums:
    """Of device scalars a device scalar: nothing waits here. A name that only one has counts as 0 in the other."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in a | b}


def total(engine: Engine, sums: Sums, name: str) -> Sums:
    """The sums over all ranks: floats, and of a float64 array (n,) another one. The host waits for the device here."""
    keys = sorted(sums)
    parts = [part if isinstance(part := sums[key], np.ndarray) else np.array([float(part)]) for key in keys]
    whole = engine.allreduce(np.concatenate(parts), name)
    split = np.split(whole, np.cumsum([len(part) for part in parts])[:-1])
    return {key: total if isinstance(sums[key], np.ndarray) else float(total[0]) for key, total in zip(keys, split, strict=True)}

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
    """The sums over all ranks, as floats; the host waits for the device here."""
    keys = sorted(sums)
    mine = np.array([float(sums[key]) for key in keys])
    return dict(zip(keys, engine.allreduce(mine, name).tolist(), strict=True))

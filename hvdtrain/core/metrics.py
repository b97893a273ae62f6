"""Metrics as sums over samples, {"loss", "right", "count", ...}: sums add up over steps and ranks, and a mean is made where it is shown."""

from __future__ import annotations

from typing import Any

# {"loss": sum, "right": sum, "count": n}: sums over samples, never means; device scalars during a step. At a sync point also:
# "nonfinite" steps; "stop.signal", "stop.time" and "save", the flags of ranks (training/health/monitor.py); "phase.*", "rank.*" and
# "joules.*" (training/telemetry); and the numbers of the noise scale (recipe/noise_scale.py).
Sums = dict[str, Any]


def zero_sums() -> Sums:
    """The sums over no samples."""
    return {"loss": 0.0, "right": 0.0, "count": 0}


def add_sums(a: Sums, b: Sums) -> Sums:
    """a + b by name; a name that is missing counts as 0. Device scalars stay device scalars, so the host does not wait."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in a | b}

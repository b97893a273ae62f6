"""Sums over samples, {"loss", "right", "count"} and more, from which every mean that is shown is made."""

from __future__ import annotations

from typing import Any

# {"loss": sum, "right": sum, "count": n}: sums over samples, never means; device scalars during a step
Sums = dict[str, Any]


def zero_sums() -> Sums:
    return {"loss": 0.0, "right": 0.0, "count": 0}


def add_sums(a: Sums, b: Sums) -> Sums:
    """Of device scalars a device scalar: nothing waits here. A name that only one has counts as 0 in the other."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in a | b}

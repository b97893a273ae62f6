"""Low-rank adapters in the arrays of a model (model.lora), by name: which arrays are theirs, and weights with adapters put into them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

A, B = ".lora_A", ".lora_B"  # ends of names: (rank, inputs), (outputs, rank)


def is_adapter(name: str) -> bool:
    """Whether an array is an adapter's."""
    return name.endswith((A, B))


def merged(arrays: Mapping[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Arrays by name without adapters, in whose layers W + scale B A is in the place of W."""
    found = {name: array for name, array in arrays.items() if not is_adapter(name)}
    for name, a in arrays.items():
        if name.endswith(A):
            layer = name.removesuffix(A)
            weight = found[f"{layer}.weight"]
            found[f"{layer}.weight"] = (weight + scale * (arrays[layer + B].astype(np.float64) @ a)).astype(weight.dtype)
    return found

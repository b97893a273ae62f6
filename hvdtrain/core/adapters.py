"""Low-rank adapters in the arrays of a model (model.lora), by name: detects them, and merges them
into weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import UserError

# suffixes of names; shapes (rank, inputs), (outputs, rank). Where a layer's weight is (inputs,
# outputs), as in Conv1D of transformers, they are (inputs, rank), (rank, outputs).
A = ".lora_A"
B = ".lora_B"


def is_adapter(name: str) -> bool:
    """Whether an array belongs to an adapter."""
    return name.endswith((A, B))


def scale_of(config: Mapping[str, Any]) -> float | None:
    """Returns the scale of a run's adapters, from the keys of its configuration; None without
    model.lora."""
    if not config.get("model.lora"):
        return None
    rank = config.get("model.lora_rank", 8)
    alpha = config.get("model.lora_alpha")
    return float((rank if alpha is None else alpha) / rank)


def merged(arrays: Mapping[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Merges adapters: returns arrays by name without them, with W + scale B A instead of W, or
    W + scale A B for a weight (inputs, outputs). One array may have several names.

    Raises UserError if a layer's weight is tied to another layer's without an adapter: a merge
    would split one array into two.
    """
    weights = {name: array for name, array in arrays.items() if not is_adapter(name)}
    sums: dict[int, np.ndarray] = {}  # by id() of each weight with an adapter
    for layer in (name.removesuffix(A) for name in arrays if name.endswith(A)):
        weight = weights.get(f"{layer}.weight")
        b = arrays.get(layer + B)
        if weight is None or b is None:
            what = f"{layer}{A} lacks its {layer}.weight or its {layer}{B}"
            raise UserError(what, "model.lora", "the weights of the whole model with its adapters")
        for name, array in weights.items():
            if (
                array is weight
                and arrays.get(name.removesuffix(".weight") + A) is not arrays[layer + A]
            ):
                what = (
                    f"{layer}.weight has an adapter and is tied to {name}, so merging would make "
                    "two arrays of one"
                )
                raise UserError(
                    what, "model.lora", f"a model that does not tie them, or no adapter for {layer}"
                )
        change = product(arrays[layer + A].astype(np.float64), b.astype(np.float64), weight.shape)
        sums[id(weight)] = (weight + scale * change).astype(weight.dtype)
    return {name: sums.get(id(array), array) for name, array in weights.items()}


def product(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the product of an adapter's arrays for a weight of this shape: B A, or A B if the
    weight is (inputs, outputs).

    The shapes of the arrays tell which: model.lora rejects the only rank for which both fit, the
    full rank of a square Conv1D.
    """
    change: np.ndarray = a @ b if is_transposed(a.shape, b.shape, shape) else b @ a
    return change


def is_transposed(a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether an adapter belongs to a weight (inputs, outputs), from the shapes of its arrays."""
    return (*b[:1], *a[1:]) != weight or a[:1] != b[1:]

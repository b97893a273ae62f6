"""What a script keeps in a checkpoint beside model and optimizer: plain values as JSON, tensors as arrays by name. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError

PREFIX = "e."  # of their names in a checkpoint
MOST_BYTES = 2**28
_TREE = f"{PREFIX}json"
_MOST_DEPTH = 32
_WHERE = "ctx.checkpoint()"
_FIX = "numbers, texts, None, lists, mappings, arrays, tensors, or an object with state_dict() of these, as a scheduler"


def to_arrays(extra: Mapping[str, Any]) -> Arrays:
    """A copy of each value. Raises UserError for one that is of another kind, and where all take more than MOST_BYTES."""
    arrays: Arrays = {}
    tree = _encoded(extra, "", arrays, 0)
    arrays[_TREE] = np.frombuffer(json.dumps(tree).encode(), np.uint8).copy()
    taken = sum(array.nbytes for array in arrays.values())
    if taken > MOST_BYTES:
        what = f"{taken / 2**20:.0f} MiB beside model and optimizer, at most {MOST_BYTES / 2**20:.0f}"
        raise UserError(what, _WHERE, "larger tensors as buffers of the model")
    return arrays


def from_arrays(arrays: Arrays) -> dict[str, Any]:
    """The values of to_arrays(). Raises ValueError where they cannot be such."""
    try:
        values = _decoded(json.loads(arrays[_TREE].tobytes()), arrays)
    except (LookupError, TypeError, RecursionError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("no mapping")
    return values


def _encoded(value: Any, path: str, arrays: Arrays, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise UserError(f"{path[:80]} is nested more than {_MOST_DEPTH} deep", _WHERE, _FIX)
    if hasattr(value, "state_dict") and callable(value.state_dict):
        value = value.state_dict()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "iufbU":
        return value.item()
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        name = f"{PREFIX}{len(arrays)}"
        arrays[name] = host.reshape(-1).view(torch.uint8).numpy().copy()
        return {"tensor": [name, str(host.dtype).removeprefix("torch."), list(host.shape)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        name = f"{PREFIX}{len(arrays)}"
        arrays[name] = np.array(value)
        return {"array": name}
    if isinstance(value, Mapping):
        pairs = [[key, _encoded(inner, f"{path}.{key}".removeprefix("."), arrays, depth + 1)] for key, inner in value.items()]
        if all(key is None or isinstance(key, (bool, int, float, str)) for key in value):
            return {"map": pairs}
    if isinstance(value, (list, tuple)):
        items = [_encoded(inner, f"{path}[{index}]", arrays, depth + 1) for index, inner in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise UserError(f"{path or 'a value'} is a {type(value).__name__}, which no checkpoint holds", _WHERE, _FIX)


def _decoded(tree: Any, arrays: Arrays) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "map":
        return {key: _decoded(inner, arrays) for key, inner in content}
    if kind in ("list", "tuple"):
        items = [_decoded(inner, arrays) for inner in content]
        return items if kind == "list" else tuple(items)
    if kind == "array":
        return arrays[content]
    name, dtype, shape = content
    found = getattr(torch, dtype)
    if kind != "tensor" or not isinstance(found, torch.dtype):
        raise ValueError(f"a value of kind {kind!r:.40}")
    data = arrays[name]
    return torch.from_numpy(np.array(data)).view(found).reshape(shape) if data.size else torch.zeros(shape, dtype=found, device="cpu")

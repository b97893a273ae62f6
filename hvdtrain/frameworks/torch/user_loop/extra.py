"""Extra values of a torch script in a checkpoint: tensors of any dtype as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks import extra
from hvdtrain.frameworks.extra import Numbers, Tensors


def to_arrays(values: Mapping[str, Any]) -> Arrays:
    """Returns a copy of each value. Raises UserError as extra.to_arrays()."""
    return extra.to_arrays(values, _TENSORS)


def from_arrays(arrays: Arrays) -> dict[str, Any]:
    """Returns the values of to_arrays(). Raises ValueError if they cannot be such."""
    return extra.from_arrays(arrays, _TENSORS)


def _numbers(value: Any) -> Numbers | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return Numbers(
        host.reshape(-1).view(torch.uint8).numpy().copy(),
        str(host.dtype).removeprefix("torch."),
        tuple(host.shape),
    )


def _tensor(numbers: Numbers) -> torch.Tensor:
    found = getattr(torch, numbers.dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor of {numbers.dtype!r:.40}")
    if not numbers.data.size:
        return torch.zeros(numbers.shape, dtype=found, device="cpu")
    return torch.from_numpy(np.array(numbers.data)).view(found).reshape(numbers.shape)


_TENSORS = Tensors(_numbers, _tensor)

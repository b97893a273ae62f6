"""Layer: a module with its own parameters, and how it is partitioned over ranks, for a picture."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvdtrain.core.arrays import Way


class Layer(NamedTuple):
    """A module with its own parameters."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    weight_bytes: int  # bytes of the largest parameter, which is partitioned
    inputs: int  # bytes of one sample
    outputs: int


class LayerCut(NamedTuple):
    """How ranks have parts of a layer."""

    way: Way
    sent: str
    groups: int = 1
    axis: int = 0  # of the weight (outputs, inputs)
    over_all: bool = False  # partitioned over all ranks; else over a tensor group


def bytes_of_sample(x: Any) -> int:
    return x.nbytes // max(1, len(x)) if isinstance(x, torch.Tensor) and x.ndim else 0

"""Weights as a plain state_dict in a file of torch's, which torch.load(weights_only=True) reads."""

from __future__ import annotations

from typing import BinaryIO

import torch

from hvdtrain.core.arrays import Arrays


def save(weights: Arrays, file: BinaryIO) -> None:
    """Raises OSError where the file cannot be written, as on a full disk."""
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in weights.items()}
    try:
        torch.save(tensors, file)  # for a path, torch's writer would not say why it failed
    except RuntimeError as error:
        cause = error.__context__
        raise (cause if isinstance(cause, OSError) else OSError(str(error))) from None

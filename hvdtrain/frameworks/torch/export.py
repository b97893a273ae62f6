"""Weights as a plain state_dict in a file of torch's, which torch.load(weights_only=True) reads."""

from __future__ import annotations

from pathlib import Path

import torch

from hvdtrain.core.arrays import Arrays


def save(weights: Arrays, path: Path) -> None:
    """Raises OSError where the file cannot be written, as on a full disk."""
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in weights.items()}
    try:
        with path.open("wb") as file:  # a file of Python's: for a path, torch's writer would not say why it failed
            torch.save(tensors, file)
    except RuntimeError as error:
        cause = error.__context__
        raise (cause if isinstance(cause, OSError) else OSError(str(error))) from None

"""What a torch model gets of x."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.tasks.inputs.transform import Transform
from hvdtrain.tasks.task import Place


class TorchInputs:
    """x of a batch, images uint8 (n, C, H, W), as the model gets it: (n, ...), single numbers (n, 1)."""

    def __init__(self, transform: Transform, place: Place, users_model: bool) -> None:
        by_channel = (1, -1, 1, 1) if transform.is_of_images else (-1,)
        self._dtype, self._largest = place.dtype, 255.0 if transform.is_of_images else 1.0
        self._is_changed = transform.is_of_images or transform.is_standardized
        self._keeps_integers = users_model
        self._mean, self._std = (
            torch.tensor(array, dtype=place.dtype, device=place.device).view(by_channel) for array in (transform.mean, transform.std)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None] if x.ndim == 1 else x
        if self._is_changed:
            return (x.to(self._dtype) / self._largest - self._mean) / self._std
        return as_given(x, self._dtype) if self._keeps_integers else x.to(self._dtype)


def as_given(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats in the model's number type, integers as int64; images, whole bytes (n, C, H, W), as they are."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    is_image = tensor.dtype == torch.uint8 and tensor.ndim == 4
    return tensor if tensor.dtype == torch.bool or is_image else tensor.long()


def as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """On the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)

"""RandAugment, color jitter and erasing on tensors of any device, with the bytes of changes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain.data.images.augment import AugmentationParameters
from hvdtrain.extras.augmentations.erasing import has_box, random_pixels
from hvdtrain.extras.augmentations.operations import apply_operations
from hvdtrain.frameworks.torch.augment import in_boxes, to_device


def apply(pixels: torch.Tensor, parameters: AugmentationParameters) -> torch.Tensor:
    """Applies operations, then erases boxes, in contiguous uint8 (n, H, W, C)."""
    if parameters.operation is not None and parameters.argument is not None:
        pixels = apply_operations(
            pixels, parameters.operation, parameters.argument, DeviceArrays(pixels)
        )
    if parameters.erase_box is not None and parameters.erase_key is not None:
        pixels = _erase(pixels, parameters.erase_box, parameters.erase_key)
    return pixels


class DeviceArrays:
    """Tensors on the device of another one."""

    xp: Any = torch
    block = 2**28  # for a GPU, where small pieces are slow; 2 GB of indices

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like

    def put(self, array: np.ndarray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(array), self._like)

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.to(getattr(torch, dtype))

    def take(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index.reshape(-1)).reshape(*index.shape, *x.shape[1:])

    def counts(self, index: torch.Tensor, length: int) -> torch.Tensor:
        ones = torch.ones((), dtype=torch.int64, device=index.device).expand(index.numel())
        return torch.zeros(length, dtype=torch.int64, device=index.device).scatter_add_(
            0, index.reshape(-1).long(), ones
        )


def _erase(pixels: torch.Tensor, boxes: np.ndarray, keys: np.ndarray) -> torch.Tensor:
    """Erases boxes. The random pixels come from the host, as many bytes as the erased images
    have."""
    _, height, width, channels = pixels.shape
    rows = has_box(boxes)
    index = to_device(rows, pixels)
    inside = in_boxes(boxes[rows], pixels, height, width)[..., None]
    pixels = pixels.clone()
    pixels[index] = torch.where(
        inside,
        to_device(random_pixels(keys[rows], height, width, channels), pixels),
        pixels[index],
    )
    return pixels

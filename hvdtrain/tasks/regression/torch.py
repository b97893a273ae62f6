"""Regression in torch: standardized inputs, and the error of each sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hvdtrain.tasks.task import Each, Place

Tensors = Mapping[str, torch.Tensor]


class TorchRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, C, H, W)."""

    def __init__(self, scale: float, mean: np.ndarray, std: np.ndarray, target_mean: np.ndarray, loss: str, place: Place) -> None:
        self._scale, self._dtype, self._loss = scale, place.dtype, loss
        self._mean, self._std, self._target_mean = (
            torch.tensor(array, dtype=place.dtype, device=place.device) for array in (mean, std, target_mean)
        )

    def inputs(self, batch: Tensors) -> torch.Tensor:
        """(x / scale, less its mean, over its deviation) in the model's number type, of images by channel."""
        x = batch["x"].to(self._dtype)
        if x.ndim == 1:
            x = x[:, None]
        if self._scale != 1.0:  # images: (n, C, H, W)
            return (x / self._scale - self._mean.view(1, -1, 1, 1)) / self._std.view(1, -1, 1, 1)
        return (x - self._mean) / self._std

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        target = batch["y"].to(self._target_mean.dtype).reshape(outputs.shape)  # (n, outputs)
        error = outputs - target
        squares, absolute = error.square(), error.abs()
        loss = (squares if self._loss == "squared_error" else absolute).mean(1)
        centred = (target - self._target_mean).double()
        terms = {
            "squares": squares.double().mean(1),
            "absolute": absolute.double().mean(1),
            "residual": squares.double(),
            "target": centred,
            "target_square": centred.square(),
        }
        return Each(loss, terms)

"""Regression in torch: the error of each sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hvdtrain.tasks.inputs.torch import TorchInputs
from hvdtrain.tasks.task import Each, Place

Tensors = Mapping[str, torch.Tensor]


class TorchRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, C, H, W)."""

    def __init__(self, inputs: TorchInputs, target_mean: np.ndarray, loss: str, place: Place) -> None:
        self._inputs, self._loss = inputs, loss
        self._target_mean = torch.tensor(target_mean, dtype=place.dtype, device=place.device)

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

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

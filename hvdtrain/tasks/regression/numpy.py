"""Regression in NumPy, with its gradient written by hand: the oracle of the other frameworks."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.tasks.task import Each, Place


class NumpyRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, H, W, C), flattened as torch does."""

    def __init__(self, scale: float, mean: np.ndarray, std: np.ndarray, target_mean: np.ndarray, loss: str, place: Place) -> None:
        self._scale, self._mean, self._std, self._target_mean = scale, mean, std, target_mean
        self._loss, self._dtype = loss, place.dtype

    def inputs(self, batch: Batch) -> np.ndarray:
        """(n, features) in the learner's number type; n may be 0."""
        x = batch["x"].astype(np.float64) / self._scale
        x = ((x[:, None] if x.ndim == 1 else x) - self._mean) / self._std
        if self._scale != 1.0:
            x = x.transpose(0, 3, 1, 2)
        return x.reshape(len(x), math.prod(x.shape[1:])).astype(self._dtype)

    def each(self, outputs: np.ndarray, batch: Batch, training: bool) -> Each:
        target = self._target(outputs, batch)
        squares, absolute = np.square(outputs - target), np.abs(outputs - target)
        loss = (squares if self._loss == "squared_error" else absolute).mean(1)
        centred = target - self._target_mean
        terms = {
            "squares": squares.mean(1),
            "absolute": absolute.mean(1),
            "residual": squares,
            "target": centred,
            "target_square": np.square(centred),
        }
        return Each(loss, terms)

    def gradient(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        """(n, outputs)"""
        error = outputs - self._target(outputs, batch)
        each = 2.0 * error if self._loss == "squared_error" else np.sign(error)
        return each / outputs.shape[1]

    def _target(self, outputs: np.ndarray, batch: Batch) -> np.ndarray:
        return np.asarray(batch["y"].astype(self._dtype).reshape(outputs.shape))

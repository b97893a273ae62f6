"""Regression in NumPy, with its gradient written by hand: the oracle of the other frameworks."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.tasks.inputs.transform import Transform
from hvdtrain.tasks.task import Each, Place


class NumpyRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, H, W, C), flattened as torch does."""

    def __init__(self, transform: Transform, target_mean: np.ndarray, loss: str, place: Place) -> None:
        self._transform, self._target_mean, self._loss, self._dtype = transform, target_mean, loss, place.dtype

    def inputs(self, batch: Batch) -> np.ndarray:
        """(n, features) in the learner's number type; n may be 0."""
        return self._transform.flat(batch["x"], self._dtype)

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

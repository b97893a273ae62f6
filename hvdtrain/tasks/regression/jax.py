"""Regression in JAX, as in torch.py. What is here is compiled."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.tasks.task import Each, Place

Arrays = Mapping[str, jax.Array]


class JaxRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, H, W, C)."""

    def __init__(self, scale: float, mean: np.ndarray, std: np.ndarray, target_mean: np.ndarray, loss: str, place: Place) -> None:
        self._scale, self._mean, self._std, self._target_mean = scale, mean, std, target_mean
        self._loss, self._dtype = loss, place.dtype

    def inputs(self, batch: Arrays) -> jax.Array:
        x = batch["x"].astype(self._dtype)
        x = x[:, None] if x.ndim == 1 else x
        mean, std = jnp.asarray(self._mean, self._dtype), jnp.asarray(self._std, self._dtype)
        return ((x if self._scale == 1.0 else x / self._scale) - mean) / std

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        target = batch["y"].astype(self._dtype).reshape(outputs.shape)  # (n, outputs)
        error = outputs - target
        squares, absolute = jnp.square(error), jnp.abs(error)
        loss = (squares if self._loss == "squared_error" else absolute).mean(1)
        centred = target - jnp.asarray(self._target_mean, self._dtype)
        terms = {
            "squares": squares.mean(1),
            "absolute": absolute.mean(1),
            "residual": squares,
            "target": centred,
            "target_square": jnp.square(centred),
        }
        return Each(loss, terms)

"""Regression in JAX, as in torch.py. What is here is compiled."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.tasks.inputs.jax import JaxInputs
from hvdtrain.tasks.task import Each, Place

Arrays = Mapping[str, jax.Array]


class JaxRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, H, W, C)."""

    def __init__(self, inputs: JaxInputs, target_mean: np.ndarray, loss: str, place: Place) -> None:
        self._inputs, self._target_mean, self._loss, self._dtype = inputs, target_mean, loss, place.dtype

    def inputs(self, batch: Arrays) -> jax.Array:
        return self._inputs(batch["x"])

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

"""What a JAX model gets of x. What is here is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.data.source import Field
from hvdtrain.tasks.inputs.transform import Transform
from hvdtrain.tasks.task import Place


class JaxInputs:
    """x of a batch, images uint8 (n, H, W, C), as the model gets it: (n, ...), single numbers (n, 1)."""

    def __init__(self, transform: Transform, place: Place, users_model: bool) -> None:
        self._transform, self._dtype, self._keeps_integers = transform, place.dtype, users_model

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[:, None] if x.ndim == 1 else x
        if self._transform.is_of_images or self._transform.is_standardized:
            mean, std = (jnp.asarray(array, self._dtype) for array in (self._transform.mean, self._transform.std))
            x = x.astype(self._dtype)
            return ((x / 255.0 if self._transform.is_of_images else x) - mean) / std
        return as_given(x, self._transform.x, self._dtype) if self._keeps_integers else x.astype(self._dtype)


def as_given(array: jax.Array, field: Field, dtype: np.dtype) -> jax.Array:
    """Floats in the model's number type, integers as int32, which a field without a bound is not on the device."""
    if np.dtype(field.dtype).kind == "f":
        return array.astype(dtype)
    is_integer = np.dtype(field.dtype).kind in "iu" and array.dtype != jnp.uint8
    return array.astype(jnp.int32) if is_integer else array

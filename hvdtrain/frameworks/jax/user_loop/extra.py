"""Extra values of a JAX script in a checkpoint: arrays of any dtype as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks import extra
from hvdtrain.frameworks.extra import Numbers, Tensors


def to_arrays(values: Mapping[str, Any]) -> Arrays:
    """Returns a copy of each value. Raises UserError like extra.to_arrays()."""
    return extra.to_arrays(values, _TENSORS)


def from_arrays(arrays: Arrays) -> dict[str, Any]:
    """Restores the values from the result of to_arrays(). Raises ValueError if the arrays are
    invalid."""
    return extra.from_arrays(arrays, _TENSORS)


def _numbers(value: Any) -> Numbers | None:
    """None of a typed random key, too: jax.random.key_data() of it is an array."""
    if not isinstance(value, jax.Array) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    host = np.array(value, order="C")
    return Numbers(host.reshape(-1).view(np.uint8).copy(), host.dtype.name, host.shape)


def _array(numbers: Numbers) -> jax.Array:
    return jnp.asarray(np.array(numbers.data).view(jnp.dtype(numbers.dtype)).reshape(numbers.shape))


_TENSORS = Tensors(_numbers, _array)

"""One linear layer from zero weights: softmax regression, or least squares with
model.loss=squared_error."""

from __future__ import annotations

import math

import jax
import numpy as np

from hvdtrain.frameworks.jax.layers import Functions, Params, dense, flatten


def build(name: str, shape: tuple[int, ...], outputs: int) -> Functions:
    """Builds a linear layer, which has no options."""

    def init(key: jax.Array) -> Params:
        return {"fc.weight": np.zeros((outputs, math.prod(shape))), "fc.bias": np.zeros(outputs)}

    def apply(params: Params, x: jax.Array) -> jax.Array:
        return dense(params, "fc", flatten(x))

    return Functions(init, apply)

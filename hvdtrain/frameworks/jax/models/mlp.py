"""A multi-layer perceptron with ReLU, as in frameworks/torch/models/mlp.py."""

from __future__ import annotations

import functools
import itertools
import math

import jax

from hvdtrain.frameworks.jax.layers import (
    OTHER_NUMBERS,
    Functions,
    Params,
    Wrap,
    as_it_is,
    dense,
    dropout,
    flatten,
    key_for,
    start,
)
from hvdtrain.frameworks.model_options import check_mlp


def build(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    *,
    widths: tuple[int, ...] = (128,),
    dropout: float = 0.0,
) -> Functions:
    """Flattened images, hidden layers, logits.

    widths: neurons of each hidden layer
    dropout: share of hidden activations dropped in training, 0 to 1

    Raises UserError for widths below 1 and a dropout outside of 0 to 1.
    """
    check_mlp(widths, dropout)
    hidden = [f"fc{i}" for i in range(1, len(widths) + 1)]
    sizes = itertools.pairwise((math.prod(shape), *widths, outputs))
    shapes: dict[str, tuple[int, ...]] = {
        layer: (outputs, inputs)
        for layer, (inputs, outputs) in zip([*hidden, "head"], sizes, strict=True)
    }

    def init(key: jax.Array) -> Params:
        return start(key, shapes)

    def apply(
        params: Params, x: jax.Array, wrap: Wrap = as_it_is, key: jax.Array | None = None
    ) -> jax.Array:
        x = flatten(x)
        for number, layer in enumerate(hidden):
            x = wrap(number, functools.partial(_hidden, layer, dropout, key_for(key, number)))(
                params, x
            )
        return dense(params, "head", x)

    return Functions(init, apply, (OTHER_NUMBERS,))


def _hidden(
    layer: str, share: float, key: jax.Array | None, params: Params, x: jax.Array
) -> jax.Array:
    return dropout(key, jax.nn.relu(dense(params, layer, x)), share)

"""A multi-layer perceptron with ReLU: the one of models/mlp.py, without dropout."""

from __future__ import annotations

import functools
import itertools
import math

import jax

from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import OTHER_NUMBERS, Apply, Init, Params, Wrap, as_it_is, dense, flatten, start, with_notes


def build(name: str, shape: tuple[int, ...], outputs: int, *, widths: tuple[int, ...] = (128,)) -> tuple[Init, Apply]:
    """Images flattened, hidden layers, logits.

    widths: neurons of each hidden layer

    Raises UserError for widths below 1.
    """
    if min(widths, default=1) < 1:
        raise UserError(f"widths {widths} make no network", "model.widths", "widths of 1 or more")
    hidden = [f"fc{i}" for i in range(1, len(widths) + 1)]
    sizes = itertools.pairwise((math.prod(shape), *widths, outputs))
    shapes: dict[str, tuple[int, ...]] = {
        layer: (outputs, inputs) for layer, (inputs, outputs) in zip([*hidden, "head"], sizes, strict=True)
    }

    def init(key: jax.Array) -> Params:
        return start(key, shapes)

    def apply(params: Params, x: jax.Array, wrap: Wrap = as_it_is) -> jax.Array:
        x = flatten(x)
        for number, layer in enumerate(hidden):
            x = wrap(number, functools.partial(_hidden, layer))(params, x)
        return dense(params, "head", x)

    return with_notes(init, OTHER_NUMBERS), apply


def _hidden(layer: str, params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(dense(params, layer, x))

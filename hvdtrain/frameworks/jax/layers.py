"""Layers as functions of their parameters, with the names, layouts and initial weights of torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]  # arrays: {"fc.weight": ..., "fc.bias": ...}
Init = Callable[[jax.Array], Params]  # key -> parameters
Block = Callable[[Params, jax.Array], jax.Array]  # one of several parts of a model, all alike
Wrap = Callable[[int, Block], Block]  # number of a block, from 0, and the block -> what is called in its place
Apply = Callable[..., jax.Array]  # parameters, images (n, H, W, C) -> logits (n, classes)


def as_it_is(number: int, block: Block) -> Block:
    """The block itself: the default of a model's `wrap`."""
    return block


OTHER_NUMBERS = "first weights are drawn by JAX: other numbers than framework=torch draws with the same seed, in the same bounds"


def with_notes(init: Init, *notes: str) -> Init:
    """The function that makes a model's parameters, with lines for the header of a job."""
    init.notes = notes  # type: ignore[attr-defined]
    return init


def start(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> Params:
    """Layer -> shape of its weights, (outputs, inputs, ...). Weights and biases are uniform within 1 / sqrt(fan in), as torch starts them.

    All are parts of one draw: each draw of another shape would be compiled by itself, which takes longer than many small jobs.
    """
    sizes = {name: (math.prod(shape), shape[0]) for name, shape in shapes.items()}
    row = np.asarray(jax.random.uniform(key, (sum(map(sum, sizes.values())),), minval=-1, maxval=1))
    params: Params = {}
    for name, shape in shapes.items():
        weight, bias, row = np.split(row, np.cumsum(sizes[name]))
        bound = math.prod(shape[1:]) ** -0.5
        params |= {f"{name}.weight": bound * weight.reshape(shape), f"{name}.bias": bound * bias}
    return params


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    """(n, inputs) -> (n, outputs)"""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def flatten(x: jax.Array) -> jax.Array:
    """(n, H, W, C) -> (n, C H W), the order that torch flattens in; of other inputs (n, ...) -> (n, features)."""
    return (jnp.transpose(x, (0, 3, 1, 2)) if x.ndim == 4 else x).reshape(len(x), -1)


def convolve(params: Params, name: str, x: jax.Array, stride: int) -> jax.Array:
    """A 3x3 cross-correlation with one row of zeros on each side: (n, H, W, inputs) -> (n, ceil(H / stride), ceil(W / stride), outputs)"""
    layout = ("NHWC", "OIHW", "NHWC")  # weights (outputs, inputs, 3, 3), as torch has them
    sides = ((1, 1), (1, 1))
    found = jax.lax.conv_general_dilated(x, params[f"{name}.weight"], (stride, stride), sides, dimension_numbers=layout)
    return found + params[f"{name}.bias"]

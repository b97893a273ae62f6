"""Layers as functions of their parameters, with the names, layouts and initial weights of torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

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


OTHER_NUMBERS = "first weights are drawn by JAX: other numbers than framework=torch draws with the same seed, by the same law"


class Reader(Protocol):
    """What reads tokens a few positions at a time, for sampling."""

    @property
    def context(self) -> int:
        """How many positions it can read."""

    def empty_cache(self, sequences: int, dtype: np.dtype) -> Any:
        """A cache for `context` positions of so many sequences: arrays in a tree."""

    def read(self, params: Params, tokens: jax.Array, cache: Any, first: Any) -> tuple[jax.Array, Any]:
        """Tokens (n, m) at the positions from `first` on -> logits (n, m, vocabulary), and the cache with them."""


class Functions(NamedTuple):
    """A model: what build() of a plugin returns. A user's own is a pair (init, apply)."""

    init: Init
    apply: Apply  # what it does in training alone follows from its parameter `key`, None in evaluation
    notes: tuple[str, ...] = ()  # lines for the header of a job
    ties: Mapping[str, str] = {}  # further name in a state dict -> the parameter that it is
    reader: Reader | None = None


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


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    """(..., width), the numbers of each position by themselves; eps 1e-5."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def dropout(key: jax.Array | None, x: jax.Array, share: float) -> jax.Array:
    """0 for `share` of the numbers, the others divided by 1 - share; x itself without a key, in evaluation."""
    if key is None or not share:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - share, x.shape), x / (1.0 - share), jnp.zeros((), x.dtype))


def key_for(key: jax.Array | None, number: int) -> jax.Array | None:
    """Another key for each part of a model; None without one."""
    return None if key is None else jax.random.fold_in(key, number)


def flatten(x: jax.Array) -> jax.Array:
    """(n, H, W, C) -> (n, C H W), the order that torch flattens in; of other inputs (n, ...) -> (n, features)."""
    return (jnp.transpose(x, (0, 3, 1, 2)) if x.ndim == 4 else x).reshape(len(x), -1)


def convolve(params: Params, name: str, x: jax.Array, stride: int) -> jax.Array:
    """A 3x3 cross-correlation with one row of zeros on each side: (n, H, W, inputs) -> (n, ceil(H / stride), ceil(W / stride), outputs)"""
    layout = ("NHWC", "OIHW", "NHWC")  # weights (outputs, inputs, 3, 3), as torch has them
    sides = ((1, 1), (1, 1))
    found = jax.lax.conv_general_dilated(x, params[f"{name}.weight"], (stride, stride), sides, dimension_numbers=layout)
    return found + params[f"{name}.bias"]

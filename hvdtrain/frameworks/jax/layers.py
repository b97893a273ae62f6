"""Layers as functions of their parameters, with the names, layouts and initial weights of torch's
layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]  # arrays: {"fc.weight": ..., "fc.bias": ...}
Init = Callable[[jax.Array], Params]  # key -> parameters
# a part of a model: a function of activations or of a Flow
Block = Callable[[Params, Any], Any]
# number of a block, from 0, and the block -> the function to call instead
Wrap = Callable[[int, Block], Block]
# parameters, images (n, H, W, C) -> logits (n, classes); or a Flow of them
Apply = Callable[..., Any]


def as_it_is(number: int, block: Block) -> Block:
    """Returns the block itself: the default of a model's `wrap`."""
    return block


OTHER_NUMBERS = (
    "first weights are drawn by JAX: other numbers than framework=torch draws with the same seed, "
    "by the same law"
)


class Reader(Protocol):
    """Reads tokens a few positions at a time, for sampling."""

    @property
    def context(self) -> int:
        """The maximum number of positions."""

    def empty_cache(self, sequences: int, dtype: np.dtype) -> Any:
        """Returns a cache for `context` positions of this number of sequences: a tree of arrays."""

    def read(
        self, params: Params, tokens: jax.Array, cache: Any, first: Any
    ) -> tuple[jax.Array, Any]:
        """Tokens (n, m) at the positions from `first` on -> logits (n, m, vocabulary), and the
        cache with them."""


class Flow(NamedTuple):
    """Activations on their way through a model with batch norms."""

    x: jax.Array  # (rows, ..., C)
    buffers: Params  # buffers of the norms computed so far, as they are after the pass
    # passed from each synchronized norm to the next, so that ranks reach them in the same order,
    # also in backward
    turn: jax.Array


class Functions(NamedTuple):
    """A model, as returned by build() of a plugin. A user's model is a pair (init, apply)."""

    init: Init
    # may have parameters `wrap`; `key`, for dropout, None in evaluation; and `norms`, from norm.py,
    # with which it returns a Flow
    apply: Apply
    notes: tuple[str, ...] = ()  # lines for the header of a job
    ties: Mapping[str, str] = {}  # further name in a state dict -> the parameter that it is
    reader: Reader | None = None
    norms: Mapping[str, int] = {}  # batch norm -> channels
    name_of: Callable[[str], str] = (
        str  # name of a parameter, from its path in the result of init(): "fc.weight"
    )


def start(
    key: jax.Array, shapes: Mapping[str, tuple[int, ...]], without_bias: Collection[str] = ()
) -> Params:
    """Returns initial weights and biases, uniform within 1 / sqrt(fan in), as in torch. shapes:
    layer -> shape of its weights, (outputs, inputs, ...).

    All are parts of one draw, because each draw of a different shape would be compiled separately,
    which takes longer than many small jobs.
    """
    sizes = {name: (math.prod(shape), shape[0]) for name, shape in shapes.items()}
    row = np.asarray(jax.random.uniform(key, (sum(map(sum, sizes.values())),), minval=-1, maxval=1))
    params: Params = {}
    for name, shape in shapes.items():
        weight, bias, row = np.split(row, np.cumsum(sizes[name]))
        bound = math.prod(shape[1:]) ** -0.5
        params[f"{name}.weight"] = bound * weight.reshape(shape)
        if name not in without_bias:
            params[f"{name}.bias"] = bound * bias
    return params


def start_normal(key: jax.Array, stds: Mapping[str, tuple[tuple[int, ...], float]]) -> Params:
    """Returns normal weights, all from one draw. stds: layer -> shape and standard deviation of its
    weights."""
    sizes = [math.prod(shape) for shape, _ in stds.values()]
    parts = np.split(np.asarray(jax.random.normal(key, (sum(sizes),))), np.cumsum(sizes)[:-1])
    return {
        f"{name}.weight": std * part.reshape(shape)
        for (name, (shape, std)), part in zip(stds.items(), parts, strict=True)
    }


def start_norms(norms: Mapping[str, int]) -> Params:
    """Returns the scales and shifts of batch norms: 1 and 0."""
    scales: Params = {f"{name}.weight": np.ones(channels) for name, channels in norms.items()}
    return scales | {f"{name}.bias": np.zeros(channels) for name, channels in norms.items()}


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    """A linear layer: (n, inputs) -> (n, outputs)."""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Normalizes each position of (..., width) separately; eps is 1e-5."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]
    )


def dropout(key: jax.Array | None, x: jax.Array, share: float) -> jax.Array:
    """Sets `share` of the numbers to 0 and divides the rest by 1 - share. Without a key, in
    evaluation, returns x."""
    if key is None or not share:
        return x
    return jnp.where(
        jax.random.bernoulli(key, 1.0 - share, x.shape), x / (1.0 - share), jnp.zeros((), x.dtype)
    )


def key_for(key: jax.Array | None, number: int) -> jax.Array | None:
    """Returns a different key for each part of a model; None without a key."""
    return None if key is None else jax.random.fold_in(key, number)


def flatten(x: jax.Array) -> jax.Array:
    """Flattens images (n, H, W, C) to (n, C H W), in torch's order, and other inputs (n, ...) to
    (n, features)."""
    return (jnp.transpose(x, (0, 3, 1, 2)) if x.ndim == 4 else x).reshape(len(x), -1)


def max_pool(x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
    """Returns the largest number of each square: (n, H, W, C) -> (n, (H + 2 padding - size) //
    stride + 1, ..., C)."""
    sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    pooled: jax.Array = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, size, size, 1), (1, stride, stride, 1), sides
    )
    return pooled


def convolve(params: Params, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    """A cross-correlation of odd size K, padded with K // 2 zeros on each side: (n, H, W, inputs)
    -> (n, ceil(H / stride), ..., outputs)."""
    weight = params[f"{name}.weight"]  # (outputs, inputs, K, K), as torch has them
    layout = ("NHWC", "OIHW", "NHWC")
    padding = weight.shape[2] // 2
    sides = ((padding, padding),) * 2
    found = jax.lax.conv_general_dilated(
        x, weight, (stride, stride), sides, dimension_numbers=layout
    )
    return found + params[f"{name}.bias"] if f"{name}.bias" in params else found

"""A small convolutional network without norms: the one of models/convnet.py with norm=false."""

from __future__ import annotations

import functools
import itertools

import jax

from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import OTHER_NUMBERS, Functions, Params, Wrap, as_it_is, convolve, dense, start

_NO_NORM = "convnet has no batch norm in JAX (model.norm=false); framework=torch has one after each convolution, unless model.norm=false"


def build(name: str, shape: tuple[int, int, int], outputs: int, *, widths: tuple[int, ...] = (16, 32, 64), norm: bool = False) -> Functions:
    """3x3 convolutions with a bias that halve the image, each with ReLU; the mean over what is left of it; logits.

    widths: channels of each convolution
    norm: false: no batch norm, as framework=torch with model.norm=false; JAX has no other

    Raises UserError for widths below 1, and for norms.
    """
    if norm:
        fix = "model.norm=false, with which framework=torch has the same network; or framework=torch"
        raise UserError("framework=jax has no batch norm, which model.norm=true asks for", "model.norm", fix)
    if min(widths, default=0) < 1:
        raise UserError(f"widths {widths} make no convolutions", "model.widths", "one width of 1 or more for each convolution")
    layers = [f"conv{i}" for i in range(1, len(widths) + 1)]
    sizes = itertools.pairwise((shape[2], *widths))
    shapes: dict[str, tuple[int, ...]] = {
        layer: (outputs, inputs, 3, 3) for layer, (inputs, outputs) in zip(layers, sizes, strict=True)
    } | {"fc": (outputs, widths[-1])}

    def init(key: jax.Array) -> Params:
        return start(key, shapes)

    def apply(params: Params, x: jax.Array, wrap: Wrap = as_it_is) -> jax.Array:
        for number, layer in enumerate(layers):
            x = wrap(number, functools.partial(_convolution, layer))(params, x)  # (n, ceil(H / 2), ceil(W / 2), width)
        return dense(params, "fc", x.mean((1, 2)))

    return Functions(init, apply, (_NO_NORM, OTHER_NUMBERS))


def _convolution(layer: str, params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(convolve(params, layer, x, stride=2))

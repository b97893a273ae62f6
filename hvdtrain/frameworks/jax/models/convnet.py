"""A small convolutional network, as in frameworks/torch/models/convnet.py."""

from __future__ import annotations

import functools
import itertools

import jax

from hvdtrain.frameworks.jax.layers import (
    OTHER_NUMBERS,
    Flow,
    Functions,
    Params,
    Wrap,
    as_it_is,
    convolve,
    dense,
    start,
    start_norms,
)
from hvdtrain.frameworks.jax.norm import Norms
from hvdtrain.frameworks.model_options import check_convnet


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    widths: tuple[int, ...] = (16, 32, 64),
    norm: bool = True,
    dense: tuple[int, ...] = (),
) -> Functions:
    """Builds 3x3 convolutions that halve the image, each with a norm and ReLU; the mean over the
    remaining pixels; dense layers; logits.

    widths: channels of each convolution
    norm: true: a batch norm after each convolution; false: none, so that any number of ranks
        computes the same
    dense: neurons of hidden dense layers, each with ReLU

    Raises UserError for widths below 1.
    """
    check_convnet(widths, dense)
    convolutions = [f"conv{i}" for i in range(1, len(widths) + 1)]
    norms = {}
    last = [*(f"dense.fc{i}" for i in range(1, len(dense) + 1)), "dense.fc"] if dense else ["fc"]
    sizes = itertools.pairwise((shape[2], *widths))
    shapes: dict[str, tuple[int, ...]] = {
        layer: (outputs, inputs, 3, 3)
        for layer, (inputs, outputs) in zip(convolutions, sizes, strict=True)
    } | {
        layer: (outputs, inputs)
        for layer, (inputs, outputs) in zip(
            last, itertools.pairwise((widths[-1], *dense, outputs)), strict=True
        )
    }
    if norm:
        norms = {f"norm{i}": width for i, width in enumerate(widths, start=1)}

    def init(key: jax.Array) -> Params:
        return start(key, shapes, convolutions if norm else ()) | start_norms(norms)

    def apply(params: Params, x: jax.Array, norms: Norms, wrap: Wrap = as_it_is) -> Flow:
        flow = norms.begin(x)
        for number in range(len(widths)):
            flow = wrap(
                number, functools.partial(_convolution, number + 1, norms if norm else None)
            )(params, flow)
        return flow._replace(x=_dense(last, params, flow.x.mean((1, 2))))

    return Functions(init, apply, (OTHER_NUMBERS,), norms=norms)


def _convolution(number: int, norms: Norms | None, params: Params, flow: Flow) -> Flow:
    """(n, H, W, C) -> (n, ceil(H / 2), ceil(W / 2), width)"""
    flow = flow._replace(x=convolve(params, f"conv{number}", flow.x, stride=2))
    flow = norms(params, f"norm{number}", flow) if norms else flow
    return flow._replace(x=jax.nn.relu(flow.x))


def _dense(layers: list[str], params: Params, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(dense(params, layer, x))
    return dense(params, layers[-1], x)

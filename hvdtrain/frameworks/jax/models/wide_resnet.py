"""A wide residual network for small images, as in frameworks/torch/models/wide_resnet.py."""

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
    dropout,
    key_for,
    max_pool,
    start,
    start_norms,
)
from hvdtrain.frameworks.jax.norm import Norms
from hvdtrain.frameworks.model_options import check_wide_resnet

PAIRS = ("narrow", "middle", "wide")


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    widths: tuple[int, int, int, int] = (16, 16, 32, 64),
    dropout: float = 0.01,
    norm: bool = True,
) -> Functions:
    """Builds the network. The default widths are narrow, so that digits train in seconds;
    16,160,320,640 are the full widths for 28x28 images.

    widths: channels of the stem and of the three pairs of blocks
    dropout: share of activations dropped between the two convolutions of a block, 0 to 1
    norm: true: a batch norm after each 3x3 convolution; false: none, so that any number of ranks
        computes the same; the convolutions then have a bias

    Raises UserError for widths below 1, a dropout outside of 0 to 1, and images too small to be
    halved twice.
    """
    check_wide_resnet(shape, widths, dropout)
    blocks = [f"{pair}.{i}" for pair in PAIRS for i in (0, 1)]
    inputs = [width for pair in itertools.pairwise(widths) for width in pair]
    sizes = dict(
        zip(
            blocks,
            zip(inputs, [width for width in widths[1:] for _ in (0, 1)], strict=True),
            strict=True,
        )
    )
    convolutions = {"stem.0": (widths[0], shape[2])}
    for block, (before, after) in sizes.items():
        convolutions |= {f"{block}.first.0": (after, before), f"{block}.second.0": (after, after)}
    scales = {
        f"{block}.scale": (after, before, 1, 1)
        for block, (before, after) in sizes.items()
        if before != after
    }
    shapes = (
        {name: (*size, 3, 3) for name, size in convolutions.items()}
        | scales
        | {"fc": (outputs, widths[3])}
    )
    norms = {}
    if norm:
        norms = {f"{name.removesuffix('.0')}.1": size[0] for name, size in convolutions.items()}

    def init(key: jax.Array) -> Params:
        return start(key, shapes, convolutions if norm else ()) | start_norms(norms)

    def apply(
        params: Params,
        x: jax.Array,
        norms: Norms,
        wrap: Wrap = as_it_is,
        key: jax.Array | None = None,
    ) -> Flow:
        flow = _convolution(norms, params, "stem", norms.begin(x))
        for number, block in enumerate(blocks):
            flow = wrap(
                number, functools.partial(_block, block, norms, dropout, key_for(key, number))
            )(params, flow)
            if block in ("narrow.1", "middle.1"):
                flow = flow._replace(x=max_pool(flow.x, size=2, stride=2))
        return flow._replace(x=dense(params, "fc", flow.x.mean((1, 2))))

    return Functions(init, apply, (OTHER_NUMBERS,), norms=norms)


def _convolution(norms: Norms, params: Params, name: str, flow: Flow) -> Flow:
    """3x3 convolution, norm (if the model has norms), ReLU."""
    flow = flow._replace(x=convolve(params, f"{name}.0", flow.x))
    if f"{name}.1.weight" in params:
        flow = norms(params, f"{name}.1", flow)
    return flow._replace(x=jax.nn.relu(flow.x))


def _block(
    name: str, norms: Norms, share: float, key: jax.Array | None, params: Params, flow: Flow
) -> Flow:
    """Two convolutions with a shortcut, which has a 1x1 convolution if the number of channels
    changes."""
    shortcut = (
        convolve(params, f"{name}.scale", flow.x) if f"{name}.scale.weight" in params else flow.x
    )
    flow = _convolution(norms, params, f"{name}.first", flow)
    flow = _convolution(
        norms, params, f"{name}.second", flow._replace(x=dropout(key, flow.x, share))
    )
    return flow._replace(x=shortcut + flow.x)

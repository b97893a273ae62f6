"""A small U-Net for classes or numbers of pixels, as in frameworks/torch/models/unet.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from hvdtrain.frameworks.jax.layers import (
    OTHER_NUMBERS,
    Flow,
    Functions,
    Params,
    Wrap,
    as_it_is,
    convolve,
    max_pool,
    start,
    start_norms,
)
from hvdtrain.frameworks.jax.norm import Norms
from hvdtrain.frameworks.model_options import check_unet

AnyNorm = Callable[[Params, str, Flow], Flow]


def build(
    name: str,
    map_shape: tuple[int, int, int],
    pixel_outputs: int,
    *,
    widths: tuple[int, ...] = (16, 32, 64),
    norm: Literal["batch", "group", "none"] = "batch",
    groups: int = 8,
) -> Functions:
    """Ronneberger et al. 2015, arXiv:1505.04597, with convolutions that keep the size, and a norm
    after each.

    widths: channels at each size of the image, from the whole one on; each next size is half
    norm: batch; group: of each sample alone, so that any number of ranks computes the same; none
    groups: channels of a group norm share statistics in so many groups

    Raises UserError for invalid widths, and for images that cannot be halved this often.
    """
    check_unet(map_shape, widths, norm, groups)
    second = 2 if norm == "none" else 3  # place of the second convolution in its block
    pairs = list(itertools.pairwise(widths))[::-1]  # from the smallest images to the largest
    blocks = {
        f"down.{number}": sizes
        for number, sizes in enumerate(itertools.pairwise((map_shape[2], *widths)))
    }
    blocks |= {f"join.{number}": (2 * narrow, narrow) for number, (narrow, _) in enumerate(pairs)}
    shapes: dict[str, tuple[int, ...]] = {}
    for block, (before, after) in blocks.items():
        shapes |= {f"{block}.0": (after, before, 3, 3), f"{block}.{second}": (after, after, 3, 3)}
    without_bias = [] if norm == "none" else list(shapes)
    ups: dict[str, tuple[int, ...]] = {
        f"up.{number}": (wide, narrow, 2, 2) for number, (narrow, wide) in enumerate(pairs)
    }
    shapes |= {**ups, "head": (pixel_outputs, widths[0], 1, 1)}
    scales = (
        {f"{block}.{place}": after for block, (_, after) in blocks.items() for place in (1, 4)}
        if norm != "none"
        else {}
    )

    def init(key: jax.Array) -> Params:
        params = start(key, shapes, without_bias) | start_norms(scales)
        return params | {
            f"{up}.bias": params[f"{up}.bias"][: sizes[1]] for up, sizes in ups.items()
        }

    def apply(params: Params, x: jax.Array, norms: Norms, wrap: Wrap = as_it_is) -> Flow:
        def block(number: int, name: str, flow: Flow) -> Flow:
            flow_after: Flow = wrap(
                number, functools.partial(_twice, name, second, _norm_of(norm, norms, groups))
            )(params, flow)
            return flow_after

        flow = norms.begin(x)
        kept = []
        for depth in range(len(widths)):
            flow = flow if depth == 0 else flow._replace(x=max_pool(flow.x, 2, 2))
            flow = block(depth, f"down.{depth}", flow)
            kept.append(flow.x)
        for number, same_size in enumerate(kept[-2::-1]):
            both = jnp.concatenate([same_size, _doubled(params, f"up.{number}", flow.x)], 3)
            flow = block(len(widths) + number, f"join.{number}", flow._replace(x=both))
        return flow._replace(x=convolve(params, "head", flow.x))

    return Functions(init, apply, (OTHER_NUMBERS,), norms=scales if norm == "batch" else {})


def _twice(block: str, second: int, norm: AnyNorm | None, params: Params, flow: Flow) -> Flow:
    """Two 3x3 convolutions, each with a norm and ReLU: (n, H, W, before) -> (n, H, W, after)."""
    for place in (0, second):
        flow = flow._replace(x=convolve(params, f"{block}.{place}", flow.x))
        flow = norm(params, f"{block}.{place + 1}", flow) if norm else flow
        flow = flow._replace(x=jax.nn.relu(flow.x))
    return flow


def _norm_of(kind: str, norms: Norms, groups: int) -> AnyNorm | None:
    if kind == "none":
        return None
    return norms if kind == "batch" else functools.partial(_group_norm, groups)


def _group_norm(groups: int, params: Params, name: str, flow: Flow) -> Flow:
    """Normalizes over the pixels and channels of each group of a sample; eps is 1e-5."""
    n, height, width, channels = flow.x.shape
    parts = flow.x.reshape(n, height, width, groups, channels // groups)
    centred = parts - parts.mean((1, 2, 4), keepdims=True)
    found = centred * jax.lax.rsqrt(jnp.square(centred).mean((1, 2, 4), keepdims=True) + 1e-5)
    return flow._replace(
        x=found.reshape(flow.x.shape) * params[f"{name}.weight"] + params[f"{name}.bias"]
    )


def _doubled(params: Params, name: str, x: jax.Array) -> jax.Array:
    """torch's ConvTranspose2d of 2 x 2 with stride 2: (n, H, W, wide) -> (n, 2 H, 2 W, narrow)."""
    n, height, width, _ = x.shape
    squares = jnp.einsum("nijc,coab->niajbo", x, params[f"{name}.weight"])
    return squares.reshape(n, 2 * height, 2 * width, -1) + params[f"{name}.bias"]

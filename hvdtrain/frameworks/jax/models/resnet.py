"""torchvision's residual networks by name, written out: He et al. 2015, arXiv:1512.03385, with the
stride in the 3x3 convolutions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from hvdtrain.frameworks.jax.layers import (
    OTHER_NUMBERS,
    Flow,
    Functions,
    Params,
    Wrap,
    as_it_is,
    convolve,
    dense,
    max_pool,
    start,
    start_normal,
    start_norms,
)
from hvdtrain.frameworks.jax.norm import Norms
from hvdtrain.frameworks.model_options import check_resnet

BLOCKS = {  # blocks of each stage
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
# models whose blocks have two 3x3 convolutions; blocks of the other models have three, the middle
# one 3x3
OF_TWO = (
    "resnet18",
    "resnet34",
)


class ResNetBlock(NamedTuple):
    """Convolutions with a shortcut."""

    name: str  # "layer1.0"
    kernels: dict[str, tuple[int, int, int, int]]  # conv1, conv2 ... -> shape of its weights
    strided: str  # the convolution that has the stride
    stride: int
    shortcut: tuple[int, int, int, int] | None  # a convolution in the shortcut


def blocks_of(counts: Sequence[int], first: int, *, of_two: bool) -> list[ResNetBlock]:
    """Returns the blocks of stages with `counts` blocks; the first stage has `first` channels."""
    blocks = []
    before = first
    for stage, count in enumerate(counts):
        width = first << stage
        for number in range(count):
            stride = 2 if stage and not number else 1
            if of_two:
                kernels = {"conv1": (width, before, 3, 3), "conv2": (width, width, 3, 3)}
            else:
                kernels = {
                    "conv1": (width, before, 1, 1),
                    "conv2": (width, width, 3, 3),
                    "conv3": (4 * width, width, 1, 1),
                }
            after = width if of_two else 4 * width
            shortcut = (after, before, 1, 1) if stride > 1 or before != after else None
            blocks.append(
                ResNetBlock(
                    f"layer{stage + 1}.{number}",
                    kernels,
                    "conv1" if of_two else "conv2",
                    stride,
                    shortcut,
                )
            )
            before = after
    return blocks


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    small_images: bool = False,
    zero_gamma: bool = False,
    norm: bool = True,
) -> Functions:
    """resnet18, resnet34, resnet50, resnet101 or resnet152 from random weights.

    small_images: true: a 3x3 first convolution of stride 1 and no first pooling, as is usual for
        32x32 pixels and less
    zero_gamma: true: the last norm of each residual block starts at scale 0, so that the block is
        its shortcut (Goyal 2017, 5.1)
    norm: true: a batch norm after each convolution; false: none, so that any number of ranks
        computes the same. The convolutions have no bias either, and each block doubles the variance
        at the start, so that the first learning rate must be small

    Raises UserError for zero_gamma without norm.
    """
    check_resnet(zero_gamma, norm)
    first = (64, shape[2], 3, 3) if small_images else (64, shape[2], 7, 7)
    by_default = small_images or shape[2] != 3
    blocks = blocks_of(BLOCKS[name], 64, of_two=name in OF_TWO)
    return network(
        blocks, first, outputs, by_default, small_images, zero_gamma=zero_gamma, norm=norm
    )


def network(
    blocks: list[ResNetBlock],
    first: tuple[int, int, int, int],
    outputs: int,
    by_default: bool,
    small_images: bool,
    *,
    zero_gamma: bool,
    norm: bool,
) -> Functions:
    """Returns a residual network. first: shape of the first convolution, (width, C, K, K);
    by_default: it starts as a layer of torch does without torchvision."""
    kernels: dict[str, tuple[int, ...]] = {}
    norms = {"bn1": first[0]}
    last = []
    for block in blocks:
        kernels |= {f"{block.name}.{conv}": size for conv, size in block.kernels.items()}
        norms |= {
            f"{block.name}.bn{i}": size[0] for i, size in enumerate(block.kernels.values(), start=1)
        }
        last.append(f"{block.name}.bn{len(block.kernels)}.weight")
        if block.shortcut:
            kernels[f"{block.name}.downsample.0"], norms[f"{block.name}.downsample.1"] = (
                block.shortcut,
                block.shortcut[0],
            )
    features = norms[last[-1].removesuffix(".weight")]
    # layers that start as a layer of torch does without torchvision
    of_torch: dict[str, tuple[int, ...]] = {"fc": (outputs, features)}
    (of_torch if by_default else kernels)["conv1"] = first
    norms = norms if norm else {}

    def init(key: jax.Array) -> Params:
        # He et al., fan out
        stds = {
            name: (size, (2.0 / (size[0] * size[2] * size[3])) ** 0.5)
            for name, size in kernels.items()
        }
        params = (
            start_normal(key, stds)
            | start(jax.random.fold_in(key, 1), of_torch, ["conv1"])
            | start_norms(norms)
        )
        return params | {name: np.zeros_like(params[name]) for name in last if zero_gamma}

    def apply(params: Params, x: jax.Array, norms: Norms, wrap: Wrap = as_it_is) -> Flow:
        flow = _normalized(norms, params, "conv1", "bn1", norms.begin(x), 1 if small_images else 2)
        x = jax.nn.relu(flow.x)
        flow = flow._replace(x=x if small_images else max_pool(x, size=3, stride=2, padding=1))
        for number, block in enumerate(blocks):
            flow = wrap(number, functools.partial(_block, block, norms))(params, flow)
        return flow._replace(x=dense(params, "fc", flow.x.mean((1, 2))))

    return Functions(init, apply, (OTHER_NUMBERS,), norms=norms)


def _normalized(
    norms: Norms, params: Params, convolution: str, norm: str, flow: Flow, stride: int
) -> Flow:
    flow = flow._replace(x=convolve(params, convolution, flow.x, stride))
    return norms(params, norm, flow) if f"{norm}.weight" in params else flow


def _block(block: ResNetBlock, norms: Norms, params: Params, flow: Flow) -> Flow:
    """Applies ReLU after each norm; after the last norm, only to its sum with the shortcut."""
    x = shortcut = flow.x
    for number, convolution in enumerate(block.kernels, start=1):
        stride = block.stride if convolution == block.strided else 1
        name = f"{block.name}.{convolution}"
        flow = _normalized(
            norms, params, name, f"{block.name}.bn{number}", flow._replace(x=x), stride
        )
        x = jax.nn.relu(flow.x)
    x = flow.x
    if block.shortcut:
        flow = flow._replace(x=shortcut)
        flow = _normalized(
            norms,
            params,
            f"{block.name}.downsample.0",
            f"{block.name}.downsample.1",
            flow,
            block.stride,
        )
        shortcut = flow.x
    return flow._replace(x=jax.nn.relu(x + shortcut))

"""A small convolutional network that trains on thousands of small images a second on two cores."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

from torch import nn

from hvdtrain.frameworks.model_options import check_convnet


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    widths: tuple[int, ...] = (16, 32, 64),
    norm: bool = True,
    dense: tuple[int, ...] = (),
) -> nn.Module:
    """Convolutions that halve the image, the mean over the remaining pixels, logits. Images (n, C,
    H, W) may have any size.

    In order, for i = 1 ... len(widths): conv{i}, a 3x3 cross-correlation of stride 2 with one row
    of zeros on each of the four sides, so that H becomes ceil(H / 2) (28, 14, 7, 4; 8, 4, 2, 1);
    norm{i}, a batch norm of eps 1e-5 and momentum 0.1; relu{i}. Then the mean over H and W, and fc,
    a linear layer. With norm, the convolutions have no bias. Without it they have a bias, and the
    parameters are conv1.weight (widths[0], C, 3, 3), conv1.bias, ..., fc.weight (outputs,
    widths[-1]), fc.bias. Initial weights and biases are as in torch: uniform between -1 /
    sqrt(fan_in) and 1 / sqrt(fan_in), where fan_in is 9 times the input channels, or widths[-1] for
    fc. Hidden dense layers precede fc: dense.fc1, dense.relu1, ..., dense.fc. This dense part may
    be partitioned over ranks.

    widths: channels of each convolution
    norm: true: a batch norm after each convolution; false: none, so that any number of ranks
        computes the same
    dense: neurons of hidden dense layers, each with ReLU

    Raises UserError for widths below 1.
    """
    check_convnet(widths, dense)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(itertools.pairwise((shape[2], *widths)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(
            before, after, kernel_size=3, stride=2, padding=1, bias=not norm
        )
        if norm:
            layers[f"norm{i}"] = nn.BatchNorm2d(after)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    if dense:
        layers["dense"] = _dense((widths[-1], *dense), outputs)
    else:
        layers["fc"] = nn.Linear(widths[-1], outputs)
    model: Any = nn.Sequential(layers)
    model.dense_part = "dense" if dense else "fc"
    built: nn.Module = model
    return built


def _dense(widths: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        layers[f"fc{i}"] = nn.Linear(before, after)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
    layers["fc"] = nn.Linear(widths[-1], outputs)
    return nn.Sequential(layers)

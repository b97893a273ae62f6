"""Krizhevsky's one-tower network for ImageNet: convolutions do most of the work, and dense layers
have most of the weights."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import Any

from torch import nn

from hvdtrain.errors import UserError

SMALL = 64  # pixels; images with a shorter side get another first layer


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    widths: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256),
    dense: tuple[int, ...] = (4096, 4096),
    dropout: float = 0.5,
) -> nn.Module:
    """Five convolutions with ReLU, three of them followed by a maximum over 3x3 in steps of 2; then
    dense layers. Images (n, C, H, W).

    Krizhevsky 2014, arXiv:1404.5997, in the widths of torchvision's alexnet, without response
    normalization: 61,100,840 parameters for 224x224x3 and 1000 classes. Dropout follows the hidden
        dense layers, as in Krizhevsky et al. 2012, section 4.2; in torchvision it precedes them.
        conv1 is 11x11 with stride 4 and 2 rows of zeros on each side. conv2 is 5x5 and the others
        are 3x3, all with padding that keeps the size. Images with a side below 64 pixels have a
        conv1 of 5x5 with stride 1, and a row of padding around each maximum: 32 becomes 16, 8, 4.

    The dense part is `dense`: fc6 and fc7 (of the widths `dense`), and fc8, the logits.
    It may be partitioned over ranks.

    widths: channels of the five convolutions
    dense: neurons of the hidden dense layers
    dropout: share of the hidden dense layers' outputs dropped in training, 0 to 1

    Raises UserError for widths below 1 and a dropout outside of 0 to 1.
    """
    if min((*widths, *dense)) < 1 or not 0 <= dropout < 1:
        what = f"widths {widths} and dense {dense} with dropout {dropout} are not valid"
        raise UserError(
            what,
            "model.widths, model.dense, model.dropout",
            "widths of 1 or more, 0 <= dropout < 1",
        )
    is_small = min(shape[:2]) < SMALL
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    sides = shape[:2] if is_small else tuple((side + 4 - 11) // 4 + 1 for side in shape[:2])
    for i, (before, after) in enumerate(itertools.pairwise((shape[2], *widths)), start=1):
        if i == 1 and not is_small:
            layers["conv1"] = nn.Conv2d(before, after, kernel_size=11, stride=4, padding=2)
        else:
            kernel = 5 if i <= 2 else 3
            layers[f"conv{i}"] = nn.Conv2d(before, after, kernel_size=kernel, padding=kernel // 2)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        if i in (1, 2, 5):
            layers[f"pool{i}"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=int(is_small))
            sides = tuple((side + 2 * is_small - 3) // 2 + 1 for side in sides)
    layers["flatten"] = nn.Flatten()
    layers["dense"] = _dense(widths[-1] * math.prod(sides), dense, outputs, dropout)
    model: Any = nn.Sequential(layers)
    model.dense_part = "dense"
    built: nn.Module = model
    return built


def _dense(inputs: int, hidden: tuple[int, ...], outputs: int, dropout: float) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(itertools.pairwise((inputs, *hidden)), start=6):
        layers[f"fc{i}"] = nn.Linear(before, after)
        layers[f"relu{i}"] = nn.ReLU(inplace=True)
        if dropout:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
    layers[f"fc{6 + len(hidden)}"] = nn.Linear((inputs, *hidden)[-1], outputs)
    return nn.Sequential(layers)

"""A wide residual network for small images: a stem, then three pairs of blocks, each pair wider and
coarser than the previous pair."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.frameworks.model_options import check_wide_resnet
from hvdtrain.frameworks.torch.sparse_dropout import SparseDropout


def convolution(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
    """Returns a 3x3 convolution, norm and ReLU; the norm has the bias, if there is one."""
    first = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=not norm)
    norms = [nn.BatchNorm2d(outputs)] if norm else []
    return nn.Sequential(first, *norms, nn.ReLU(inplace=True))


class WideResNetBlock(nn.Module):
    """Two convolutions with a shortcut, which has a 1x1 convolution if the number of channels
    changes."""

    def __init__(self, inputs: int, outputs: int, dropout: float, norm: bool) -> None:
        super().__init__()
        self.scale = (
            nn.Conv2d(inputs, outputs, kernel_size=1) if inputs != outputs else nn.Identity()
        )
        self.first = convolution(inputs, outputs, norm)
        self.dropout = SparseDropout(dropout)
        self.second = convolution(outputs, outputs, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x) + self.second(self.dropout(self.first(x)))


class WideResNet(nn.Module):
    """Images (n, C, H, W) of at least 4x4 -> logits (n, classes)."""

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: tuple[int, int, int, int],
        dropout: float,
        norm: bool,
    ) -> None:
        super().__init__()
        stem, narrow, middle, wide = widths

        def pair(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                WideResNetBlock(inputs, outputs, dropout, norm),
                WideResNetBlock(outputs, outputs, dropout, norm),
            )

        self.stem = convolution(channels, stem, norm)
        self.narrow = pair(stem, narrow)
        self.middle = pair(narrow, middle)
        self.wide = pair(middle, wide)
        self.halve = nn.MaxPool2d(2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(wide, classes)
        self.blocks = [*self.narrow, *self.middle, *self.wide]  # a list: no new names of parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.halve(self.narrow(self.stem(x)))  # (n, narrow, H / 2, W / 2)
        x = self.halve(self.middle(x))  # (n, middle, H / 4, W / 4)
        return self.fc(self.pool(self.wide(x)).flatten(1))  # (n, wide) -> (n, classes)


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    widths: tuple[int, int, int, int] = (16, 16, 32, 64),
    dropout: float = 0.01,
    norm: bool = True,
) -> nn.Module:
    """Builds the network. The default widths are narrow, so that digits train in seconds;
    16,160,320,640 are the full widths for 28x28 images.

    Unlike the ResNets it has no zero_gamma, because a block ends with a norm and ReLU. With a scale
    of 0 the ReLU would get 0, where its slope is 0, so that norm and the convolutions before it
    would never get a gradient.

    widths: channels of the stem and of the three pairs of blocks
    dropout: share of activations dropped between the two convolutions of a block, 0 to 1
    norm: true: a batch norm after each 3x3 convolution; false: none, so that any number of ranks
        computes the same; the convolutions then have a bias

    Raises UserError for widths below 1, a dropout outside of 0 to 1, and images too small to be
    halved twice.
    """
    check_wide_resnet(shape, widths, dropout)
    return WideResNet(shape[2], outputs, widths, dropout, norm)

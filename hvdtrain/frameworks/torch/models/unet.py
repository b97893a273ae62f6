"""A small U-Net for classes or numbers of pixels: images halved and doubled again, with the
features of each size kept (arXiv:1505.04597)."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import nn

from hvdtrain.frameworks.model_options import check_unet

Norm = Literal["batch", "group", "none"]


class UNet(nn.Module):
    """(n, C, H, W) -> (n, outputs, H, W), H and W any multiple of 2 ** (len(widths) - 1)."""

    def __init__(
        self, channels: int, outputs: int, widths: tuple[int, ...], norm: Norm, groups: int
    ) -> None:
        super().__init__()
        before = (channels, *widths)
        self.down = nn.ModuleList(_twice(a, b, norm, groups) for a, b in itertools.pairwise(before))
        pairs = list(itertools.pairwise(widths))[::-1]  # from the smallest images to the largest
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairs
        )
        self.join = nn.ModuleList(_twice(2 * narrow, narrow, norm, groups) for narrow, _ in pairs)
        self.head = nn.Conv2d(widths[0], outputs, 1)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that model.recompute may recompute."""
        return [*self.down, *self.join]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for depth, block in enumerate(self.down):
            # (n, widths[depth], H / 2 ** depth, W / 2 ** depth)
            x = block(x if depth == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, join, same_size in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([same_size, up(x)], 1))
        outputs: torch.Tensor = self.head(x)
        return outputs


def _twice(before: int, after: int, norm: Norm, groups: int) -> nn.Sequential:
    """Two 3x3 convolutions that keep the size, each with a norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers.append(nn.Conv2d(channels, after, 3, padding=1, bias=norm == "none"))
        if norm != "none":
            layers.append(nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(groups, after))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def build(
    name: str,
    map_shape: tuple[int, int, int],
    pixel_outputs: int,
    *,
    widths: tuple[int, ...] = (16, 32, 64),
    norm: Literal["batch", "group", "none"] = "batch",
    groups: int = 8,
) -> nn.Module:
    """Ronneberger et al. 2015, arXiv:1505.04597, with convolutions that keep the size, and a norm
    after each.

    widths: channels at each size of the image, from the whole one on; each next size is half
    norm: batch; group: of each sample alone, so that any number of ranks computes the same; none
    groups: channels of a group norm share statistics in so many groups

    Raises UserError for invalid widths, and for images that cannot be halved this often.
    """
    check_unet(map_shape, widths, norm, groups)
    return UNet(map_shape[2], pixel_outputs, widths, norm, groups)

"""torchvision's residual networks by name, with as many input channels as the images have."""

from __future__ import annotations

from typing import Any

from torch import nn

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.frameworks.model_options import check_resnet


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    small_images: bool = False,
    zero_gamma: bool = False,
    norm: bool = True,
) -> nn.Module:
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
    model: Any = getattr(import_torchvision().models, name)(
        num_classes=outputs,
        zero_init_residual=zero_gamma,
        norm_layer=nn.BatchNorm2d if norm else nn.Identity,
    )
    if small_images:
        model.conv1 = nn.Conv2d(shape[2], 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif shape[2] != 3:
        model.conv1 = nn.Conv2d(shape[2], 64, kernel_size=7, stride=2, padding=3, bias=False)
    # a list: no new names
    model.blocks = [
        block
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4)
        for block in stage
    ]
    built: nn.Module = model
    return built

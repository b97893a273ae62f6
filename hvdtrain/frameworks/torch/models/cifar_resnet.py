"""The residual networks of He et al. 2015 for CIFAR-10, from torchvision's blocks."""

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
    zero_gamma: bool = False,
    norm: bool = True,
) -> nn.Module:
    """resnet8, resnet14, resnet20, resnet32, resnet44, resnet56 or resnet110 from random weights,
    for images of about 32x32 pixels (He et al. 2015, arXiv:1512.03385, 4.2).

    A 3x3 convolution of 16 channels, then three stages of n blocks with 16, 32 and 64 channels and
    two 3x3 convolutions each, so that 6n + 2 layers have weights; the mean over the remaining
    pixels; logits. Deviation from the paper: where the channels change, the shortcut is a 1x1
    convolution, as in torchvision and MLPerf Tiny.

    zero_gamma: true: the last norm of each residual block starts at scale 0, so that the block is
        its shortcut (Goyal 2017, 5.1)
    norm: true: a batch norm after each convolution; false: none, so that any number of ranks
        computes the same. The convolutions have no bias either, and each block doubles the variance
        at the start, so that the first learning rate must be small

    Raises UserError for zero_gamma without norm.
    """
    check_resnet(zero_gamma, norm)
    each = (int(name.removeprefix("resnet")) - 2) // 6
    return CifarResNet(shape[2], outputs, each, zero_gamma, norm)


class CifarResNet(nn.Module):
    """Images (n, C, H, W) -> logits (n, classes)."""

    def __init__(
        self, channels: int, classes: int, each: int, zero_gamma: bool, norm: bool
    ) -> None:
        super().__init__()
        block: Any = import_torchvision().models.resnet.BasicBlock
        layer: Any = nn.BatchNorm2d if norm else nn.Identity

        def stage(inputs: int, width: int, stride: int) -> nn.Sequential:
            shortcut = None
            if inputs != width:
                one = nn.Conv2d(inputs, width, kernel_size=1, stride=stride, bias=False)
                shortcut = nn.Sequential(one, layer(width))
            first = block(inputs, width, stride, shortcut, norm_layer=layer)
            others = [block(width, width, norm_layer=layer) for _ in range(each - 1)]
            return nn.Sequential(first, *others)

        self.conv1 = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = layer(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(16, 16, 1)
        self.layer2 = stage(16, 32, 2)
        self.layer3 = stage(32, 64, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_gamma and isinstance(module, block):
                nn.init.zeros_(module.bn2.weight)
        self.blocks = [*self.layer1, *self.layer2, *self.layer3]  # a list: no new names

    def forward(self, x: Any) -> Any:
        x = self.layer3(self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(self.pool(x).flatten(1))

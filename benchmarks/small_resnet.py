"""A residual network for CIFAR-10 that reads 4,000 images a second in training on one core: the model of large_batch.py.

hvdtrain --config configs/cifar10_muon_2048.yaml    (model.name=benchmarks.small_resnet:SmallResNet, from the root of the repository)
"""  # noqa: E501

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions with a shortcut; if the image is halved, the shortcut is a 1x1 convolution
    (He 2015, arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Images (n, C, 32, 32) -> logits: a stem of stride 2, then blocks at 16x16, 8x8 and 4x4
    pixels."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, widths: tuple[int, ...] = (16, 32, 64)
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(shape[2], widths[0], 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        before = (widths[0], *widths)
        self.blocks = nn.Sequential(
            *(Block(before[i], width, 1 if i == 0 else 2) for i, width in enumerate(widths))
        )
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (n, widths[-1], H / 8, W / 8) -> (n, classes)
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))

"""Made-up measurements for a model with two inputs: a picture of a tank, its radius and length, and
how much is in it.

PYTHONPATH=. hvdtrain --config configs/two_inputs.yaml    (from the root of the repository)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def tanks(split: str, samples: int = 4000) -> dict[str, np.ndarray]:
    """image uint8 (n, 16, 16, 1), noisy and dark up to the level; table float32 (n, 2), radius and
    length; y float32 (n,), the volume."""
    random = np.random.default_rng(split == "val")
    level = random.uniform(0.1, 1, samples)
    size = random.uniform(0.5, 1.5, (samples, 2))
    is_filled = np.arange(16)[::-1, None] < 16 * level[:, None, None]  # (n, 16, 1), from the bottom
    image = np.where(is_filled, 60, 190)[..., None] + random.normal(0, 30, (samples, 16, 16, 1))
    volume = level * size[:, 0] ** 2 * size[:, 1]
    return {
        "image": image.clip(0, 255).astype(np.uint8),
        "table": size.astype(np.float32),
        "y": volume.astype(np.float32),
    }


class TankNet(nn.Module):
    """image (n, 1, 16, 16) and table (n, 2) -> (n, 1)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.both = nn.Sequential(
            nn.Linear(8 * 4 * 4 + 2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, image: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.both(torch.cat([self.image(image), table], 1))

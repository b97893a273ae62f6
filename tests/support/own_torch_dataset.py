"""A torch Dataset with the numbers of own_datasets.Noisy, which draws from torch's generator."""

from __future__ import annotations

from typing import Any

import own_data
import torch


class NoisyInTorch(torch.utils.data.Dataset[Any]):
    def __init__(self, split: str) -> None:
        self.x, self.y = (torch.from_numpy(array) for array in own_data.numbers(split).values())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "x": self.x[index] + 0.2 * torch.randn(3, 2, dtype=torch.float64),
            "y": self.y[index],
        }

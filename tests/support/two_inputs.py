"""Data with an image and a table of each sample, and models that get both; importable as a user's
own code is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

SAMPLES = 23


def fields(split: str = "train") -> dict[str, np.ndarray]:
    """image uint8 (n, 6, 5, 1), table float64 (n, 3), and targets of every task."""
    random = np.random.default_rng(split == "val")
    image = random.integers(0, 256, (SAMPLES, 6, 5, 1), np.uint8)
    table = random.normal(3.0, 2.0, (SAMPLES, 3))
    return {
        "image": image,
        "table": table,
        "y": table @ [0.5, -1.0, 0.3] + image.mean((1, 2, 3)) / 50,
    }


def classes(split: str = "train") -> dict[str, np.ndarray]:
    found = fields(split)
    return {**found, "y": (found["y"] > found["y"].mean()).astype(np.int64)}


def labels(split: str = "train") -> dict[str, np.ndarray]:
    found = fields(split)
    return {**found, "y": (found["table"] > 3.0).astype(np.uint8)}


def masks(split: str = "train") -> dict[str, np.ndarray]:
    found = fields(split)
    return {**found, "y": (found["image"][..., 0] > 100).astype(np.int64)}


def nested(split: str = "train") -> Any:
    """A torch Dataset whose samples are {"x": {"image": ..., "table": ...}, "y": ...}."""
    return Nested(fields(split))


class Nested(torch.utils.data.Dataset[Any]):
    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image, table, y = (self.arrays[name][index] for name in ("image", "table", "y"))
        return {"x": {"image": torch.from_numpy(image), "table": table}, "y": y}


class Flat(Nested):
    """Samples {"image": ..., "table": ..., "label": ...}."""

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        return {**found["x"], "label": found["y"]}


def flat(split: str = "train") -> Any:
    return Flat(fields(split))


class Net(nn.Module):
    """A model that gets both inputs by name and returns `outputs` numbers."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.image = nn.Linear(30, 4)
        self.table = nn.Linear(3, 4)
        self.both = nn.Linear(8, outputs)

    def forward(self, image: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.both(
            torch.cat([self.image(image.flatten(1)).tanh(), self.table(table).tanh()], 1)
        )
        return found


class OfDict(Net):
    """A model that gets both inputs in one dict."""

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x["image"], x["table"])


class OfPixels(nn.Module):
    """Logits of each pixel (n, classes, H, W), of the image and of the table."""

    def __init__(self, pixel_classes: int) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, pixel_classes, 3, padding=1)
        self.table = nn.Linear(3, pixel_classes)

    def forward(self, image: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.image(image) + self.table(table)[:, :, None, None]
        return found

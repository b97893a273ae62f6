"""Image files in memory, made when they are read: worker processes import this module in a quarter
of a second."""

from __future__ import annotations

import io
import os
import time
from dataclasses import dataclass

import numpy as np
from PIL import Image


def pixels_of(value: int) -> np.ndarray:
    """Returns pixels, uint8 (6, 5, 3), different for each value below 256."""
    rows, columns, channels = np.ogrid[:6, :5, :3]
    return ((value + 20 * rows + 3 * columns + 50 * channels) % 256).astype(np.uint8)


@dataclass(frozen=True)
class InMemory:
    """PNG files, each followed by `padding` bytes. One may not be an image, and one may take
    forever."""

    images: int
    broken: int = -1
    endless: int = -1
    where: str = "memory"
    padding: int = 0

    def __len__(self) -> int:
        return self.images

    def content(self, index: int) -> bytes:
        if index == self.endless:
            time.sleep(2000)
        file = io.BytesIO()
        Image.fromarray(pixels_of(index)).save(file, "png")
        return b"nothing" if index == self.broken else file.getvalue() + bytes(self.padding)

    def name(self, index: int) -> str:
        return f"image {index}"


@dataclass(frozen=True)
class InThisProcess(InMemory):
    """PNG files that no other process can have."""

    def __reduce__(self) -> str:
        raise TypeError("these images are of this process")


@dataclass(frozen=True)
class EndsItsReader(InMemory):
    """PNG files that end the process which unpickles them."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)

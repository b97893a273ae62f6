"""Small images whose pixels are known, as arrays and as files; what worker processes make of
them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdtrain.extras.image_files.image_source import ImageSource


def colour(value: int, height: int = 6, width: int = 5) -> np.ndarray:
    """uint8 (H, W, 3), each pixel unlike its neighbours."""
    rows, columns, channels = np.ogrid[:height, :width, :3]
    return ((value + 20 * rows + 3 * columns + 50 * channels) % 256).astype(np.uint8)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def save_jpegs(folder: Path, images: int) -> list[Path]:
    """JPEGs of two classes and many sizes, larger ones too, one of them grey."""
    for number in range(images):
        pixels = colour(number, 20 + number, 90 - 5 * number)
        save(
            folder / str(number % 2) / f"{number:02}.jpg",
            pixels[..., 0] if number == 3 else pixels,
        )
    return sorted(folder.rglob("*.jpg"))


def check_workers(threads: ImageSource, images: int) -> None:
    """Two processes read the bytes of these images, 12 or more of 16 x 16 pixels, that threads
    read."""
    processes = threads.read_by(2)
    orders = [
        np.array(order, np.int64) for order in ([5], [11, 0, 0, 3, 7], [], range(images), [2] * 40)
    ]
    with ThreadPoolExecutor(3) as pool:
        for order, batch in zip(orders * 3, pool.map(processes.read, orders * 3), strict=True):
            expected = threads.read(order)
            np.testing.assert_array_equal(batch["x"], expected["x"])
            np.testing.assert_array_equal(batch["y"], expected["y"])
            assert batch["x"].dtype == np.uint8 and batch["x"].shape == (len(order), 16, 16, 3)
    for wrong in ([images], [-1, 2]):
        with pytest.raises(IndexError, match=f"samples .* of {images}"):
            processes.read(np.array(wrong))
    assert [part.tolist() for part in processes.stats()] == [
        part.tolist() for part in threads.stats()
    ]
    assert processes.digests(1) == threads.digests(1) and processes.identity() == threads.identity()
    assert processes.workers is not None
    pids = [worker.process.pid for worker in processes.workers.workers]
    assert len(set(pids)) == 2 and all(pid != os.getpid() for pid in pids)

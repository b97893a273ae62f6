"""Treats stored pixels with labels as images with classes, like arrays in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.channel_stats import ChannelStats, sampled_stats, stats_of_images
from hvdtrain.data.labels import read_labels
from hvdtrain.data.source import LARGE_BYTES, Foresight, LabelledImages
from hvdtrain.data.user_data.arrays import MOST_CLASSES, as_images
from hvdtrain.extras.science.stored.source import StoredSource

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


@dataclass(frozen=True, eq=False)
class StoredImages(LabelledImages):
    """Reads the field x, uint8 (H, W, C), (C, H, W) or (H, W), as images (H, W, C). Labels start at
    0."""

    source: StoredSource
    shape: tuple[int, int, int]
    classes: int
    class_names: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return self.source.notes

    @property
    def where(self) -> str:
        return self.source.where

    def __len__(self) -> int:
        return len(self.source)

    def read_by(self, workers: int) -> StoredImages:
        return replace(self, source=self.source.read_by(workers))

    def labels(self) -> np.ndarray:
        labels = self.source.known_labels()
        assert labels is not None
        return labels

    def read(self, indices: np.ndarray) -> Batch:
        is_alone = self.source.pool is None and not self.source.foresight
        pixels = as_images(
            self.source.read_field("x", indices) if is_alone else self.source.read(indices)["x"]
        )
        assert pixels is not None
        return {"x": np.ascontiguousarray(pixels), "y": read_labels(self.labels(), indices)}

    @property
    def foresight(self) -> Foresight | None:
        return self.source.foresight

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.source.expect(indices, anew)

    def stats(self) -> ChannelStats:
        """Computes statistics over all images up to 1 GiB of pixels, else over at most 2,000."""
        is_large = len(self) * math.prod(self.shape) > LARGE_BYTES
        return sampled_stats(self) if is_large else stats_of_images(self, np.arange(len(self)))

    def image_digest(self, seed: int) -> str:
        return self.source.digests(seed)["arrays"]


def images_of(source: StoredSource) -> StoredImages | None:
    """Returns the source as images with classes; None if its fields are not images with labels."""
    if set(source.fields) != {"x", "y"}:
        return None
    x = source.fields["x"]
    one = as_images(np.empty((1, *x.shape), x.dtype))
    labels = source.known_labels() if one is not None else None
    if (
        one is None
        or labels is None
        or labels.dtype.kind == "b"
        or not len(labels)
        or labels.min() < 0
        or labels.max() >= MOST_CLASSES
    ):
        return None
    _, height, width, channels = one.shape
    classes = len(source.class_names) or int(labels.max()) + 1
    return StoredImages(source, (height, width, channels), classes, source.class_names)

"""ImageSource: images that are decoded whenever they are read, by threads or by worker processes, and never kept."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdtrain.data.channel_stats import ChannelStats
from hvdtrain.data.images.decode import Name, decode
from hvdtrain.data.sampled_digest import digest_of_some
from hvdtrain.data.sampled_stats import sampled_stats
from hvdtrain.data.source import Field, check_indices, digest_of_labels, image_digests, image_fields
from hvdtrain.data.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_SMALL_BYTES = 2**12  # an image file of 100 x 100 pixels


class EncodedImages(Protocol):
    """Image files by index, wherever they are stored. Safe to call from several threads."""

    @property
    def where(self) -> str:
        """Where all of them are, for messages."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> bytes:
        """The bytes of one image file. Raises UserError where they cannot be read."""

    def name(self, index: int) -> str:
        """The name of one image in messages. May take time: an archive is searched for it."""


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Decodes images into arrays: what a worker process has a copy of."""

    encoded: EncodedImages
    shape: tuple[int, int, int]  # (H, W, C)
    crop: bool  # take the centre square; else every image must have the size of `first`
    first: Name  # the image that `shape` was read from
    defined_at: str = __name__

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": Field("uint8", self.shape)}

    @property
    def name(self) -> str:
        return self.encoded.where

    def read_into(self, arrays: Mapping[str, np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> None:
        """Nothing here is random: `seeds` are not used. Raises UserError where an image cannot be decoded."""
        x = arrays["x"]
        for row, index in enumerate(indices.tolist()):
            content = self.encoded.content(index)
            pixels = decode(content, partial(self.encoded.name, index), self.first, self.shape, self.crop)
            x[row] = np.frombuffer(pixels, np.uint8).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class ImageSource:
    """A source that decodes each image when it is read: on the thread that reads it, or in worker processes."""

    encoded: EncodedImages
    y: np.ndarray  # int64 (n,), each in 0..classes-1
    classes: int
    shape: tuple[int, int, int]  # (H, W, C)
    crop: bool  # take the centre square; else every image must have the size of `first`
    first: Name  # the image that `shape` was read from
    class_names: tuple[str, ...] = ()
    workers: WorkerPool | None = None
    small_images_lock: Lock = field(default_factory=Lock)

    @property
    def fields(self) -> dict[str, Field]:
        return image_fields(self)

    def __len__(self) -> int:
        return len(self.encoded)

    def labels(self) -> np.ndarray:
        return self.y

    def read(self, indices: np.ndarray) -> Batch:
        """Raises UserError where an image cannot be decoded, or a worker process ended."""
        check_indices(indices, len(self))
        if self.workers is not None:
            x = self.workers.read(indices, indices)["x"]
        else:
            x = np.empty((len(indices), *self.shape), np.uint8)
            with self._one_thread_if_small(indices):
                self.reader.read_into({"x": x}, indices, indices)
        return {"x": x, "y": self.y[indices]}

    @property
    def reader(self) -> ImageReader:
        return ImageReader(self.encoded, self.shape, self.crop, self.first)

    def read_by(self, workers: int) -> ImageSource:
        """The same images, decoded in so many processes of their own."""
        return replace(self, workers=WorkerPool(self.reader, workers))

    def is_small(self, index: int) -> bool:
        """Whether the image's file is small: decoding it is mostly Python, so one thread is as fast as several."""
        return len(self.encoded.content(index)) < _SMALL_BYTES

    def stats(self) -> ChannelStats:
        """Over at most 2,000 images: see sampled_stats()."""
        return sampled_stats(self)

    def label_digest(self) -> str:
        return digest_of_labels(self.y)

    def image_digest(self, seed: int) -> str:
        return digest_of_some(self, seed)

    def digests(self, seed: int) -> dict[str, str]:
        return image_digests(self, seed)

    def identity(self) -> dict[str, str]:
        return {"labels": self.label_digest()}

    def _one_thread_if_small(self, indices: np.ndarray) -> AbstractContextManager[object]:
        """Batches of small images are read one after the other.

        Two threads pass the interpreter lock to and fro at every file: of 32 x 32 images they read 0.56 times as many as one thread, of
        500 x 375 images 1.65 times as many.
        """
        return self.small_images_lock if len(indices) > 0 and self.is_small(int(indices[0])) else nullcontext()

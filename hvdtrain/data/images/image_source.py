"""ImageSource: images that are decoded whenever they are read, and never kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdtrain.data.channel_stats import ChannelStats
from hvdtrain.data.images.decode import Name, decode
from hvdtrain.data.sampled_digest import digest_of_some
from hvdtrain.data.sampled_stats import sampled_stats
from hvdtrain.data.source import Field, check_indices, digest_of_labels, image_digests, image_fields

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
class ImageSource:
    """A source that decodes each image when it is read, on the thread that reads it."""

    encoded: EncodedImages
    y: np.ndarray  # int64 (n,), each in 0..classes-1
    classes: int
    shape: tuple[int, int, int]  # (H, W, C)
    crop: bool  # take the centre square; else every image must have the size of `first`
    first: Name  # the image that `shape` was read from
    class_names: tuple[str, ...] = ()
    small_images_lock: Lock = field(default_factory=Lock)

    @property
    def fields(self) -> dict[str, Field]:
        return image_fields(self)

    def __len__(self) -> int:
        return len(self.encoded)

    def labels(self) -> np.ndarray:
        return self.y

    def pixels(self, index: int) -> bytes:
        """(H, W, C), row by row. Raises UserError where the image cannot be decoded."""
        return decode(self.encoded.content(index), partial(self.encoded.name, index), self.first, self.shape, self.crop)

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        x = np.empty((len(indices), *self.shape), np.uint8)
        with self._one_thread_if_small(indices):
            for row, index in enumerate(indices.tolist()):
                x[row] = np.frombuffer(self.pixels(index), np.uint8).reshape(self.shape)
        return {"x": x, "y": self.y[indices]}

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

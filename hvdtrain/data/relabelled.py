"""A data set under other label numbers: those of a model that knows the same classes in another order, or more of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.channel_stats import ChannelStats
from hvdtrain.data.source import ArraySource, Field, LabelledImages, digest_of_labels, image_digests, image_fields

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


def relabelled(source: LabelledImages, class_names: Sequence[str]) -> LabelledImages:
    """The source with the labels that its classes have in `class_names`, which has all of them."""
    numbers = np.array([class_names.index(name) for name in source.class_names], np.int64)
    if isinstance(source, ArraySource):
        return replace(source, y=numbers[source.y], classes=len(class_names), class_names=tuple(class_names))
    return Relabelled(source, numbers, tuple(class_names))


@dataclass(frozen=True, eq=False)
class Relabelled:
    """A source whose labels are numbered anew."""

    source: LabelledImages
    numbers: np.ndarray  # int64 (classes of the source,): the new label of each
    class_names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.source.shape

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def fields(self) -> dict[str, Field]:
        return image_fields(self)

    def __len__(self) -> int:
        return len(self.source)

    def labels(self) -> np.ndarray:
        return self.numbers[self.source.labels()]

    def read(self, indices: np.ndarray) -> Batch:
        batch = self.source.read(indices)
        return batch | {"y": self.numbers[batch["y"]]}

    def stats(self) -> ChannelStats:
        return self.source.stats()

    def label_digest(self) -> str:
        return digest_of_labels(self.labels())

    def image_digest(self, seed: int) -> str:
        return self.source.image_digest(seed)

    def digests(self, seed: int) -> dict[str, str]:
        return image_digests(self, seed)

    def identity(self) -> dict[str, str]:
        return {"labels": self.label_digest()}

"""Data sets with labels numbered as the classes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.channel_stats import ChannelStats
from hvdtrain.data.field import Field
from hvdtrain.data.source import ArraySource, Foresight, LabelledImages, Source

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


def relabelled_rows(source: Source, class_names: Sequence[str]) -> Source:
    """Returns a table with labels renumbered by `class_names`, which contains all its classes."""
    own = source.class_names
    numbers = np.array([class_names.index(name) for name in own], np.int64)
    return source if own == tuple(class_names) else _RelabelledRows(source, numbers, class_names)


@dataclass(frozen=True, eq=False)
class _RelabelledRows(AroundSource):
    """A table whose labels are renumbered."""

    source: Source
    numbers: np.ndarray  # int64 (classes of the source,): the new label of each class
    names: Sequence[str]

    @property
    def fields(self) -> dict[str, Field]:
        return {**self.source.fields, "y": Field("int64", (), len(self.names))}

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.names)

    def read(self, indices: np.ndarray) -> Batch:
        batch = self.source.read(indices)
        return {**batch, "y": self.numbers[batch["y"]]}

    def known_labels(self) -> np.ndarray | None:
        labels = self.source.known_labels()
        return None if labels is None else self.numbers[labels]


def relabelled(source: LabelledImages, class_names: Sequence[str]) -> LabelledImages:
    """Returns the source with labels renumbered by `class_names`, which contains all its
    classes."""
    numbers = np.array([class_names.index(name) for name in source.class_names], np.int64)
    if isinstance(source, ArraySource):
        return replace(
            source, y=numbers[source.y], classes=len(class_names), class_names=tuple(class_names)
        )
    return Relabelled(source, numbers, tuple(class_names))


@dataclass(frozen=True, eq=False)
class Relabelled(LabelledImages):
    """A source whose labels are renumbered."""

    source: LabelledImages
    numbers: np.ndarray  # int64 (classes of the source,): the new label of each class
    class_names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.source.shape

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.source)

    def labels(self) -> np.ndarray:
        return self.numbers[self.source.labels()]

    def read(self, indices: np.ndarray) -> Batch:
        batch = self.source.read(indices)
        return batch | {"y": self.numbers[batch["y"]]}

    def stats(self) -> ChannelStats:
        return self.source.stats()

    @property
    def foresight(self) -> Foresight | None:
        return self.source.foresight

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.source.expect(indices, anew)

    def image_digest(self, seed: int) -> str:
        return self.source.image_digest(seed)

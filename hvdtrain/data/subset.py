"""Data sets derived from another one: a subset of samples or fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.source import (
    ArraySource,
    Foresight,
    LabelledImages,
    NamedArrays,
    Source,
    check_indices,
)

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


def subset(source: Source, indices: np.ndarray) -> Source:
    """Returns the samples at `indices`, in memory if the source is."""

    def of_part(part: Source, name: str, first: int) -> Source:
        is_in = (first <= indices) & (indices < first + len(part))
        return _of_one_part(part, indices[is_in] - first)

    return source.each_part(of_part)


def _of_one_part(source: Source, indices: np.ndarray) -> Source:
    if isinstance(source, ArraySource):
        return replace(source, x=source.x[indices], y=source.y[indices])
    return (
        SubsetOfImages(source, indices)
        if isinstance(source, LabelledImages)
        else Subset(source, indices)
    )


@dataclass(frozen=True, eq=False)
class Subset(AroundSource):
    """Samples of another source, in the order of `indices`, int64 (n,)."""

    source: Source
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        return self.source.read(self.indices[indices])

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        check_indices(indices, len(self))
        return self.source.read_in_epochs(self.indices[indices], epochs, seed)

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.source.expect(self.indices[indices], anew)

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        return self.source.known_stats(
            name, self.indices if indices is None else self.indices[indices], channels
        )

    def known_labels(self) -> np.ndarray | None:
        labels = self.source.known_labels()
        return None if labels is None else labels[self.indices]

    def known_lengths(self, name: str) -> np.ndarray | None:
        lengths = super().known_lengths(name)
        return None if lengths is None else lengths[self.indices]

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed) | self._of_indices()

    def identity(self) -> dict[str, str]:
        return self.source.identity() | self._of_indices()

    def _of_indices(self) -> dict[str, str]:
        return {"part": digest({"indices": self.indices})}


def without_fields(source: Source, names: Sequence[str]) -> Source:
    """Returns the source without some of its fields."""
    if isinstance(source, Subset):
        return replace(source, source=without_fields(source.source, names))
    if isinstance(source, NamedArrays):
        return replace(
            source,
            arrays={name: array for name, array in source.arrays.items() if name not in names},
        )
    return _WithoutFields(source, frozenset(names))


@dataclass(frozen=True, eq=False)
class _WithoutFields(AroundSource):
    """Removes fields from a source that is read sample by sample."""

    source: Source
    names: frozenset[str]

    @property
    def fields(self) -> dict[str, Field]:
        return {name: field for name, field in self.source.fields.items() if name not in self.names}

    def read(self, indices: np.ndarray) -> Batch:
        return self._without(self.source.read(indices))

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        return self._without(self.source.read_in_epochs(indices, epochs, seed))

    def known_labels(self) -> np.ndarray | None:
        return self.source.known_labels()

    def _without(self, batch: Batch) -> Batch:
        return {name: array for name, array in batch.items() if name not in self.names}


@dataclass(frozen=True, eq=False)
class SubsetOfImages(LabelledImages):
    """A subset of labelled images. At most 2,000 of them are read for mean and deviation."""

    source: LabelledImages
    indices: np.ndarray | None

    def read_by(self, workers: int) -> SubsetOfImages:
        return replace(self, source=cast(LabelledImages, self.source.read_by(workers)))

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.source.shape

    @property
    def classes(self) -> int:
        return self.source.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        return self.source.columns

    def __len__(self) -> int:
        return len(self.source if self.indices is None else self.indices)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.source.notes

    def labels(self) -> np.ndarray:
        return self.source.labels() if self.indices is None else self.source.labels()[self.indices]

    def read(self, indices: np.ndarray) -> Batch:
        return self.source.read(self._in_source(indices))

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        return self.source.read_in_epochs(self._in_source(indices), epochs, seed)

    @property
    def foresight(self) -> Foresight | None:
        return self.source.foresight

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.source.expect(self._in_source(indices), anew)

    def _in_source(self, indices: np.ndarray) -> np.ndarray:
        check_indices(indices, len(self))
        return indices if self.indices is None else self.indices[indices]

    @property
    def crops_at_random(self) -> bool:
        return self.source.crops_at_random

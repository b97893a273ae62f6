"""Samples whose numbers are checked when they are read, and integers in the type that a task declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.own.dataset import DatasetSource
from hvdtrain.data.source import (
    Field,
    LabelledImages,
    NamedArrays,
    Source,
    check_numbers,
    known_labels,
    read_in_epochs,
    reads_from_memory,
    reads_in_process,
)
from hvdtrain.data.subset import Subset

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


@dataclass(frozen=True, eq=False)
class CheckedSource:
    """A source that checks samples: an integer that its field may not have, or a number that is not finite, raises UserError."""

    source: Source
    where: str
    declared: Mapping[str, Field] = field(default_factory=dict)  # of integers, in place of the source's own

    @property
    def fields(self) -> Mapping[str, Field]:
        return {**self.source.fields, **self.declared}

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray) -> Batch:
        return self._checked(self.source.read(indices), indices)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        return self._checked(read_in_epochs(self.source, indices, epochs, seed), indices)

    def known_labels(self) -> np.ndarray | None:
        return known_labels(self.source)

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed)

    def identity(self) -> dict[str, str]:
        return self.source.identity()

    @property
    def reads_from_memory(self) -> bool:
        return reads_from_memory(self.source)

    @property
    def reads_in_process(self) -> bool:
        return reads_in_process(self.source)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(getattr(self.source, "notes", ()))

    def _checked(self, batch: Batch, indices: np.ndarray) -> Batch:
        for name, kind in self.fields.items():
            check_numbers(name, batch[name], kind, self.where, indices)
        return {**batch, **{name: batch[name].astype(kind.dtype, copy=False) for name, kind in self.declared.items()}}


def as_declared(source: Source, fields: Mapping[str, Field]) -> Source:
    """The source with its integers as the fields of a task have them: labels of any integer type are int64 of known classes.

    Raises UserError where an integer is none that its field may have: of sources in memory at once, of all others when it is read.
    """
    if isinstance(source, LabelledImages):
        if "y" in fields:
            check_numbers("y", source.labels(), fields["y"], where_of(source))
        return source
    found = source.fields
    declared = {name: kind for name, kind in fields.items() if name in found and _are_integers(found[name], kind)}
    if isinstance(source, Subset):
        return dataclasses.replace(source, source=as_declared(source.source, fields))
    if isinstance(source, NamedArrays):
        return _arrays_as_declared(source, {name: kind for name, kind in declared.items() if found[name] != kind})
    if not isinstance(source, (CheckedSource, DatasetSource)) and all(found[name] == kind for name, kind in declared.items()):
        return source  # hvdtrain's own, as of tokens, whose numbers are what its fields say
    inner = source.source if isinstance(source, CheckedSource) else source
    return CheckedSource(inner, where_of(source), declared)


def _are_integers(found: Field, declared: Field) -> bool:
    return np.dtype(found.dtype).kind in "iub" and np.dtype(declared.dtype).kind in "iu"


def _arrays_as_declared(source: NamedArrays, declared: Mapping[str, Field]) -> Source:
    if not declared:
        return source
    for name, kind in declared.items() if not source.is_large else ():
        check_numbers(name, source.arrays[name], kind, source.where)  # in the type that they have: a cast would change wrong numbers
    if source.is_large and any(source.fields[name].dtype != kind.dtype for name, kind in declared.items()):
        return CheckedSource(source, source.where, declared)
    arrays = {name: array.astype(declared[name].dtype, copy=False) if name in declared else array for name, array in source.arrays.items()}
    values = {**source.values, **{name: kind.values for name, kind in declared.items()}}
    ignored = {name: kind.ignored for name, kind in declared.items() if kind.ignored is not None}
    return NamedArrays(arrays, values, source.where, ignored)


def where_of(source: Source) -> str:
    """What messages call a source: its path or name."""
    return str(getattr(source, "where", "") or (where_of(source.source) if hasattr(source, "source") else "data.name"))

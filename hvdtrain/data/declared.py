"""Sources whose integers have the types and bounds that a task declares, and whose numbers are
checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.around_source import AroundSource, inner_source, where_of
from hvdtrain.data.field import Field, check_numbers
from hvdtrain.data.source import LabelledImages, NamedArrays, Source
from hvdtrain.data.subset import Subset

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch
    from hvdtrain.data.grid import Grid


@dataclass(frozen=True, eq=False)
class CheckedSource(AroundSource):
    """A source that checks samples. It raises UserError for an integer outside its field's range,
    and for a number that is not finite."""

    source: Source
    where: str
    # integer fields that replace the fields of the source
    declared: Mapping[str, Field] = field(default_factory=dict)

    @property
    def fields(self) -> Mapping[str, Field]:
        return {**self.source.fields, **self.declared}

    def read(self, indices: np.ndarray) -> Batch:
        return self._checked(self.source.read(indices), indices)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        return self._checked(self.source.read_in_epochs(indices, epochs, seed), indices)

    def known_labels(self) -> np.ndarray | None:
        return self.source.known_labels()

    def known_grid(self, text: str) -> Grid | None:
        return self.source.known_grid(text)

    def _checked(self, batch: Batch, indices: np.ndarray) -> Batch:
        for name, kind in self.fields.items():
            check_numbers(name, batch[name], kind, self.where, indices)
        return {
            **batch,
            **{
                name: batch[name].astype(kind.dtype, copy=False)
                for name, kind in self.declared.items()
            },
        }


def as_declared(source: Source, fields: Mapping[str, Field]) -> Source:
    """Returns the source with its integers converted to the fields that a task declares: labels of
    any integer dtype become int64 class numbers.

    Raises UserError if an integer is outside its field's range: immediately for sources in memory,
    else when it is read.
    """
    if isinstance(source, LabelledImages):
        if "y" in fields:
            check_numbers("y", source.labels(), fields["y"], where_of(source))
        return source
    found = source.fields
    declared = {
        name: kind
        for name, kind in fields.items()
        if name in found and _are_integers(found[name], kind)
    }
    if isinstance(source, Subset):
        return dataclasses.replace(source, source=as_declared(source.source, fields))
    if isinstance(source, NamedArrays):
        return _arrays_as_declared(
            source, {name: kind for name, kind in declared.items() if found[name] != kind}
        )
    if isinstance(source, CheckedSource):
        declared = {**source.declared, **declared}
    is_own = not isinstance(source, CheckedSource) and not _innermost(source).is_users_dataset
    if is_own and all(found[name] == kind for name, kind in declared.items()):
        return source  # a source of hvdtrain, such as tokens, whose integers are in range
    inner = source.source if isinstance(source, CheckedSource) else source
    return CheckedSource(inner, where_of(source), declared)


def _innermost(source: Source) -> Source:
    """Returns the innermost source that this one wraps, or the source itself."""
    while (inner := inner_source(source)) is not None:
        source = inner
    return source


def _are_integers(found: Field, declared: Field) -> bool:
    return np.dtype(found.dtype).kind in "iub" and np.dtype(declared.dtype).kind in "iu"


def _arrays_as_declared(source: NamedArrays, declared: Mapping[str, Field]) -> Source:
    if not declared:
        return source
    for name, kind in declared.items() if not source.is_large else ():
        # checked before the cast, which would change wrong values
        check_numbers(name, source.arrays[name], kind, source.where)
    if source.is_large and any(
        source.fields[name].dtype != kind.dtype for name, kind in declared.items()
    ):
        return CheckedSource(source, source.where, declared)
    arrays = {
        name: array.astype(declared[name].dtype, copy=False) if name in declared else array
        for name, array in source.arrays.items()
    }
    values = {**source.values, **{name: kind.values for name, kind in declared.items()}}
    ignored = {name: kind.ignored for name, kind in declared.items() if kind.ignored is not None}
    return dataclasses.replace(source, arrays=arrays, values=values, ignored=ignored)


def bounded_alike(*sources: Source) -> list[Source]:
    """Returns the sources with common bounds: the longest sample of padded fields and the largest
    value, over all sources."""
    kinds = [
        (name, kind)
        for source in sources
        for name, kind in source.fields.items()
        if kind.padding is not None
    ]
    longest = {
        name: max(kind.shape[0] for other, kind in kinds if other == name) for name, _ in kinds
    }
    values = {name: max(kind.values for other, kind in kinds if other == name) for name, _ in kinds}
    return [source.with_bounds(longest, values) for source in sources] if kinds else list(sources)

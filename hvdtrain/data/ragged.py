"""Variable-length samples, stored one after the other, and padded to the longest sample of a
read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.field import Field, Padding, check_numbers
from hvdtrain.data.source import Source, check_indices
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

LEAST = 2  # least number of rows to pad to: a language model reads one token and predicts one


def padded_length(lengths: np.ndarray, longest: int) -> int:
    """Returns the number of rows to pad samples of these lengths to: the largest length, or
    `longest` if there are no samples."""
    return max(min(LEAST, longest), int(lengths.max())) if len(lengths) else longest


def mask_of(lengths: np.ndarray, rows: int) -> np.ndarray:
    """Returns bool (n, rows): which rows of samples with these lengths are real."""
    mask: np.ndarray = np.arange(rows) < lengths[:, None]
    return mask


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays (length, ...) of samples, one after the other: sample i is values[edges[i] : edges[i +
    1]]."""

    values: np.ndarray
    edges: np.ndarray  # int64 (n + 1,), starting at 0

    def __len__(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 (n,)"""
        return np.diff(self.edges)

    def padded(self, indices: np.ndarray, rows: int, value: float) -> np.ndarray:
        """Returns the samples at `indices`, (n, rows, ...), each padded with `value`. No sample may
        be longer than `rows`."""
        mask = mask_of(self.lengths[indices], rows)
        filled = np.full((*mask.shape, *self.values.shape[1:]), value, self.values.dtype)
        filled[mask] = self.values[(self.edges[indices][:, None] + np.arange(rows))[mask]]
        return filled


def ragged(samples: Sequence[np.ndarray], what: str, where: str) -> Ragged:
    """Concatenates the arrays along their first axis. Raises UserError if other axes or the dtypes
    differ."""
    first = next((sample for sample in samples if len(sample)), samples[0])
    for number, sample in enumerate(samples):
        alike = sample.shape[1:] == first.shape[1:] and (
            sample.dtype.kind == first.dtype.kind or not len(sample)
        )
        if not alike:
            shown = (
                f"sample {number} of {what} is {sample.dtype} {sample.shape}, and another one "
                f"{first.dtype} {first.shape}"
            )
            raise UserError(shown, where, "the same type, and the same shape after the first axis")
    edges = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Ragged(
        np.concatenate([sample for sample in samples if len(sample)] or samples[:1]), edges
    )


@dataclass(frozen=True, eq=False)
class PaddedArrays(Source):
    """A source of arrays in memory, some with variable-length samples.

    A read pads these to the longest sample that it reads, and returns a mask of the real rows for
    each. Raises UserError if the arrays have different numbers of samples, or if a number is not
    finite.
    """

    arrays: Mapping[str, np.ndarray | Ragged]
    padding: Mapping[str, Padding]  # for each Ragged
    where: str  # a path or a name, for messages
    # bounds that cover another set, too; they replace the bounds of the arrays
    longest: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)  # Field.values
    nested_inputs: tuple[str, ...] = ()
    reads_from_memory = True

    def __post_init__(self) -> None:
        if len({len(array) for array in self.arrays.values()}) > 1:
            shown = ", ".join(f"{len(array):,} of {name}" for name, array in self.arrays.items())
            raise UserError(
                f"the fields do not have the same samples: {shown}",
                self.where,
                "one array of each field for each sample",
            )
        for name, kind in self.fields.items():
            array = self.arrays.get(name)
            if isinstance(array, Ragged):
                check_numbers(
                    name,
                    array.values,
                    kind,
                    self.where,
                    np.repeat(np.arange(len(array)), array.lengths),
                )
            elif array is not None:
                check_numbers(name, array, kind, self.where)

    @property
    def fields(self) -> dict[str, Field]:
        return self._fields

    @cached_property
    def _fields(self) -> dict[str, Field]:
        fields: dict[str, Field] = {}
        for name, array in self.arrays.items():
            if isinstance(array, Ragged):
                own = int(array.lengths.max(initial=0))
                shape = (max(LEAST, own, self.longest.get(name, 0)), *array.values.shape[1:])
                fields |= padded_fields(
                    name,
                    Field(str(array.values.dtype), shape, self.values.get(name, 0)),
                    self.padding[name],
                )
            else:
                fields[name] = Field(str(array.dtype), array.shape[1:], self.values.get(name, 0))
        return fields

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        batch: Batch = {}
        for name, array in self.arrays.items():
            if isinstance(array, Ragged):
                lengths = array.lengths[indices]
                rows = padded_length(lengths, self.fields[name].shape[0])
                batch[name] = array.padded(indices, rows, self.padding[name].value)
                batch[self.padding[name].mask] = mask_of(lengths, rows)
            else:
                batch[name] = np.array(array[indices])
        return batch

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> PaddedArrays:
        """Returns the source with the longest samples and the largest values of both sources."""
        return replace(self, longest=dict(longest), values=dict(values))

    def known_labels(self) -> np.ndarray | None:
        y = self.arrays.get("y")
        return y if isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "iub" else None

    def known_lengths(self, name: str) -> np.ndarray | None:
        array = self.arrays.get(name)
        return array.lengths if isinstance(array, Ragged) else None

    def digests(self, seed: int) -> dict[str, str]:
        return self.identity()

    def identity(self) -> dict[str, str]:
        parts = {
            f"{name} edges": array.edges
            for name, array in self.arrays.items()
            if isinstance(array, Ragged)
        }
        whole = {
            name: array.values if isinstance(array, Ragged) else array
            for name, array in self.arrays.items()
        }
        return {
            "arrays": digest(
                {name: np.ascontiguousarray(array) for name, array in (whole | parts).items()}
            )
        }


def padded_fields(name: str, kind: Field, padding: Padding) -> dict[str, Field]:
    """Returns the field of samples with at most kind.shape[0] rows, and its mask."""
    is_outside = bool(kind.values) and not 0 <= padding.value < kind.values
    found = kind._replace(
        padding=padding, ignored=int(padding.value) if is_outside else kind.ignored
    )
    return {name: found, padding.mask: Field("bool", kind.shape[:1], padding=Padding(False, ""))}


def check_padding(padding: Mapping[str, Padding], dtypes: Mapping[str, str], where: str) -> None:
    """Raises UserError if there is no such field, if a mask has the name of another field, or if a
    field cannot store the padding value."""
    for name, pad in padding.items():
        if name not in dtypes:
            fix = "a field of the data, or leave it out"
            raise UserError(
                f"data.pad or data.pack names the field {name!r}, but the data only have "
                f"{', '.join(dtypes)}",
                where,
                fix,
            )
        if (
            pad.mask in dtypes
            or not pad.mask.isidentifier()
            or [one.mask for one in padding.values()].count(pad.mask) > 1
        ):
            fix = f"another name: data.mask={{{name}: real}}"
            raise UserError(
                f"the mask of {name} cannot be called {pad.mask!r}: that is not a valid name, or "
                "another field has it",
                where,
                fix,
            )
        with np.errstate(over="ignore"):
            is_exact = np.array(pad.value).astype(dtypes[name]) == pad.value
        if not is_exact:
            raise UserError(
                f"data.pad has {pad.value:g} for {name}, which is {dtypes[name]}",
                where,
                f"a number that {dtypes[name]} can represent",
            )

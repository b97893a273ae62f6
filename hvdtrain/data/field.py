"""One named field of each sample, and the check of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hvdtrain.errors import UserError

# the axis of a sample along which a field has its channels; none: all numbers are of one channel
Channels = Literal["first", "last", "none"]


class Padding(NamedTuple):
    """How a sample is padded when it is read together with a longer one."""

    value: float
    # name of the field, bool (T,), that marks the real rows; empty if this field is a mask itself
    mask: str


TARGETS = ("y", "label", "labels", "target")  # the first of these columns in a table is y
_TARGETS = (*TARGETS, "targets")


def padded_by(field: str) -> str:
    """Returns the configuration text that pads a field. Targets are padded with the value that
    torch's cross_entropy() ignores, since 0 would be a class."""
    return f"data.pad={{{field}: {-100 if field in _TARGETS else 0}}}"


class Field(NamedTuple):
    """One named value of each sample: its dtype, shape and range."""

    dtype: str  # a NumPy name: "uint8", "int64", "float32"
    shape: tuple[int, ...]  # of one sample
    values: int = 0  # integers are in 0 ... values - 1; 0: any number
    ignored: int | None = (
        None  # one more value that integers may have; it marks samples that a task ignores
    )
    padding: Padding | None = (
        None  # samples have 0 to shape[0] rows: a read pads to the longest sample that it reads
    )
    gaps: bool = False  # whether floats may be NaN, where a value is missing

    def __str__(self) -> str:
        below = f" below {self.values:,}" if self.values else ""
        shape = (
            f"{self.shape}"
            if self.padding is None
            else f"(up to {self.shape[0]}{''.join(f', {size}' for size in self.shape[1:])})"
        )
        return f"{self.dtype} {shape}{below}"

    @property
    def is_mask(self) -> bool:
        """Whether the field is a mask that marks the real rows of another field."""
        return self.padding is not None and not self.padding.mask

    def fits(self, other: Field) -> bool:
        """Whether a model for this field also accepts samples of another field; variable-length
        samples must not be longer."""
        if self.padding is None or other.padding is None:
            return self.shape == other.shape and self.padding == other.padding
        return self.shape[1:] == other.shape[1:] and self.shape[0] >= other.shape[0]

    def facts(self) -> list[Any]:
        """Returns plain JSON values, from which field_of_facts() recreates it."""
        return [
            self.dtype,
            list(self.shape),
            self.values,
            *([] if self.padding is None else [list(self.padding)]),
        ]


def field_of_facts(facts: Sequence[Any]) -> Field:
    """Rebuilds a field from Field.facts(). Raises TypeError or ValueError if they are invalid."""
    dtype, shape, values, *padding = facts
    field = Field(np.dtype(dtype).name, tuple(shape), values)
    if not padding:
        return field
    value, mask = padding[0]
    is_number = isinstance(value, (int, float)) and isinstance(mask, str)
    if len(padding) > 1 or not is_number or not shape:
        raise ValueError("impossible padding")
    return field._replace(
        padding=Padding(value, mask),
        ignored=int(value) if values and not 0 <= value < values else None,
    )


def check_numbers(
    name: str, array: np.ndarray, field: Field, where: str, samples: np.ndarray | None = None
) -> None:
    """Raises UserError if a number is not finite, or if an integer is outside the field's range.
    Reads about 16 MB at a time.

    samples: the indices of the rows, for the message; None: 0, 1, 2 and so on.
    """
    if array.dtype.kind not in "iufb":
        raise UserError(
            f"field {name} is {describe(array)}, expected numbers",
            where,
            "convert it to integers or floats",
        )
    is_float = array.dtype.kind == "f"
    # the model gets integers as int64
    values = field.values or (2**63 if array.dtype == np.uint64 else 0)
    if not is_float and not values:
        return
    rows = max(1, 2**24 // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        wrong = ~np.isfinite(part) if is_float else (part < 0) | (part >= values)
        if is_float and field.gaps:
            wrong = np.isinf(part)
        if not is_float and field.ignored is not None:
            wrong &= part != field.ignored
        if wrong.any():
            first = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            expected = "a finite number" if is_float else f"0 to {values - 1}"
            sample = start + first[0] if samples is None else samples[start + first[0]]
            fix = (
                "replace it, or leave the sample out"
                if is_float
                else _fix_of_integers(name, values, int(part[first]), len(field.shape))
            )
            raise UserError(
                f"field {name} of sample {sample} has {part[first]}, expected {expected}",
                where,
                fix,
            )


def _fix_of_integers(name: str, values: int, wrong: int, axes: int) -> str:
    if values == 2**63:
        return "convert it to floats, or subtract a number: the model gets integers as int64"
    if name != "y":
        return "count from 0; `values` of the field is how many there are"
    fix = f"labels count from 0 to {values - 1}: y - 1 where they begin at 1"
    if axes == 1:  # several labels of a sample
        return fix
    if axes > 1:
        return (
            f"{fix}; where {wrong} stands for no class, task.ignore_label={wrong} of "
            "task.name=segmentation, which keeps these pixels out of loss and metrics"
        )
    return (
        f"{fix}, leave the sample out where it has no class, or task.ignore_label={wrong} of "
        "task.name=classification, which keeps these samples out of loss and metrics"
    )


def columns_of_channels(values: np.ndarray, channels: Channels) -> np.ndarray:
    """Returns the numbers of samples (n, ...) as (numbers, channels)."""
    if channels == "none" or values.ndim == 1:
        return values.reshape(-1, 1)
    turned = np.moveaxis(values, 1, -1) if channels == "first" else values
    return turned.reshape(-1, turned.shape[-1])


def channel_count(shape: tuple[int, ...], channels: Channels) -> int:
    """Returns the number of channels of a sample of this shape."""
    if channels == "none" or not shape:
        return 1
    return shape[0 if channels == "first" else -1]


def describe(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"

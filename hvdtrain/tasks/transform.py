"""The transform of x before the model: scaling with mean and deviation, and which data are scaled.
The statistics are bit-identical on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from hvdtrain.config.sections.data import DataConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import fold
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.field import Channels, Field, columns_of_channels
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.errors import UserError

_MOST_VALUES = 2**22  # most values to read: about 2 s of exact sums
STANDARDIZE = "task.standardize"
_AXIS = "standardized_axis"  # of Task.facts()
_FILL = "missing_x"
Standardize = bool | Literal["channel"] | None  # task.standardize


class ColumnStats(NamedTuple):
    """Mean and deviation over all axes but that of the channels, the last one by default, float64
    (C,) each; (1,) for single numbers."""

    mean: np.ndarray
    std: np.ndarray  # 1 if a column is constant


class WithStats(AroundSource):
    """A source of images with mean and deviation from the configuration; everything else comes from
    the wrapped source."""

    def __init__(self, source: Source, given: ColumnStats) -> None:
        self.source = source
        self.given = given

    def _around(self, source: Source) -> Source:
        return type(self)(source, self.given)

    def read(self, indices: np.ndarray) -> Batch:
        return self.source.read(indices)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        return self.source.read_in_epochs(indices, epochs, seed)

    @property
    def crops_at_random(self) -> bool:
        return self.source.crops_at_random

    def known_labels(self) -> np.ndarray | None:
        return self.source.known_labels()


class ImagesWithStats(WithStats, LabelledImages):
    """Images with classes, with mean and deviation from the configuration."""

    source: LabelledImages

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.source.shape

    @property
    def classes(self) -> int:
        return self.source.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    def known_labels(self) -> np.ndarray:
        return self.source.labels()

    def labels(self) -> np.ndarray:
        return self.source.labels()


def without_stats(source: Source) -> Source:
    """Returns the source that WithStats() wraps."""
    return source.source if isinstance(source, WithStats) else source


def with_stats(source: Source, config: DataConfig, standardize: Any) -> Source:
    """Returns the source with data.mean and data.std, if they are set; standardize:
    task.standardize. Raises UserError if they do not fit."""
    mean = config.mean
    std = config.std
    if not mean and not std:
        return source
    where = config.where("mean" if mean else "std")
    x = source.fields.get("x")
    if x is None or not is_image(x):
        has = (
            f"x is {x}" if x is not None else f"the data have {', '.join(source.fields)}, and no x"
        )
        raise UserError(
            f"data.mean and data.std apply to images x; {has}",
            where,
            "leave them out: task.standardize controls the scaling of x",
        )
    if len(mean) != x.shape[-1] or len(std) != x.shape[-1] or min(std) <= 0:
        what = (
            f"data.mean={list(mean)} and data.std={list(std)} do not fit images with "
            f"{x.shape[-1]} channel{'s' if x.shape[-1] > 1 else ''}"
        )
        raise UserError(what, where, "a number for each channel in both, with deviations above 0")
    if standardize is False:
        raise UserError(
            "with task.standardize=false, data.mean and data.std have no effect",
            where,
            "one of them",
        )
    stats = ColumnStats(np.array(mean), np.array(std))
    return (ImagesWithStats if isinstance(source, LabelledImages) else WithStats)(source, stats)


def column_stats(source: Source, name: str, channels: Channels = "last") -> ColumnStats:
    """Returns the statistics of a field: exact for up to 2**22 numbers. For more, they come from
    the files, or from 2**22 numbers drawn by counters. channels: the axis of the field that they
    belong to."""
    if name == "x" and isinstance(source, WithStats):
        return source.given
    if name == "x" and isinstance(source, LabelledImages):
        return ColumnStats(*source.stats())
    field = source.fields[name]
    samples = len(source)
    most = max(1, _MOST_VALUES // max(1, math.prod(field.shape)))
    chosen = np.arange(samples)
    if samples > most:
        known = None if is_image(field) else source.known_stats(name, channels=channels)
        if known is not None:
            return ColumnStats(*known)
        chosen = np.unique(fold(np.arange(most, dtype=np.uint64)) % np.uint64(samples)).astype(
            np.int64
        )
    # (values, C)
    values = columns_of_channels(source.read(chosen)[name].astype(np.float64), channels)
    values = values / (255.0 if is_image(field) else 1.0)
    columns = [column[~np.isnan(column)] if field.gaps else column for column in values.T]
    means = [math.fsum(column.tolist()) / max(1, len(column)) for column in columns]
    squares = [
        math.fsum(((column - mean) ** 2).tolist()) / max(1, len(column))
        for column, mean in zip(columns, means, strict=True)
    ]
    return ColumnStats(
        np.array(means), np.array([math.sqrt(square) if square else 1.0 for square in squares])
    )


def is_image(field: Field) -> bool:
    """Whether the field contains pixels, (H, W, C), which are first divided by 255."""
    return field.dtype == "uint8" and len(field.shape) == 3


@dataclass(frozen=True, eq=False)
class Transform:
    """Computes (x - mean) / std, for images (pixels / 255 - mean) / std; or returns x unchanged.

    run.transform(x) applies the transform of a job to arrays, to get the inputs of its model.
    """

    x: Field
    mean: np.ndarray  # float64 (C,) or (1,), of each channel; zeros if nothing is subtracted
    std: np.ndarray  # float64 of the same shape, never 0; ones if nothing is divided
    dtype: str = "float32"  # dtype of the model's numbers
    keeps_integers: bool = False  # x unchanged, even if it has integers, for a user's model
    channels_last: bool = False  # images are (H, W, C), as in JAX
    channels: Channels = "last"  # the axis of x that mean, std and fill belong to
    fill: np.ndarray | None = None  # what replaces NaN, of each channel; None: x has none

    @property
    def is_of_images(self) -> bool:
        return is_image(self.x)

    @property
    def is_standardized(self) -> bool:
        return bool((self.mean != 0).any() or (self.std != 1).any())

    def along(self, stats: np.ndarray) -> np.ndarray:
        """Returns mean or std in a shape that broadcasts to x (n, ...)."""
        if self.channels != "first":
            return stats
        return stats.reshape(-1, *[1] * (len(self.x.shape) - 1))

    @property
    def formula(self) -> str:
        """The formula, with mean and std along the axis of the channels."""
        x = "pixels / 255" if self.is_of_images else "x"
        if not self.is_standardized:
            return x
        return f"({x} - mean) / std"

    @property
    def summary(self) -> str:
        """One line that describes the inputs of the model."""
        if self.is_of_images:
            numbers = (
                f" by channel: mean {_some(self.mean)}, std {_some(self.std)}"
                if self.is_standardized
                else ", not normalized"
            )
            return self.formula + numbers
        if self.is_standardized:
            by = "column" if len(self.x.shape) < 2 else "its last axis"
            by = by if self.channels == "last" else "channel"
            missing = "" if self.fill is None else ", 0 where x is NaN"
            return (
                f"{self.formula} by {by}{missing}, of the training set: run.transform(x); "
                f"{STANDARDIZE}=false leaves x as it is"
            )
        if self.fill is not None:
            return "x as the data have it, with the mean of its channel where x is NaN"
        is_changed = np.dtype(self.x.dtype).kind in "iu" and not self.keeps_integers
        as_floats = (
            f" as {self.dtype}"
            if is_changed or (np.dtype(self.x.dtype).kind == "f" and self.x.dtype != self.dtype)
            else ""
        )
        if self.x.padding is not None:  # cannot be standardized
            return f"x as the data have it, {self.x.dtype}{as_floats}"
        return (
            f"x as the data have it, {self.x.dtype}{as_floats}; {STANDARDIZE}=true: (x - mean) / "
            "std of the training set"
        )

    def __call__(self, x: Any) -> np.ndarray:
        """Transforms rows x (n, ...) of numpy, torch or pandas. Raises UserError for another
        shape."""
        from hvdtrain.data.user_data.arrays import as_images, to_numpy

        array = to_numpy(x, "x", "run.transform()")
        if self.is_of_images:
            images = as_images(array)
            array = array if images is None else images
        if not self._has_rows(array):
            what = (
                f"x is {array.dtype} {array.shape}, but the model was trained on rows of {self.x}"
            )
            sizes = (
                self.x.shape
                if self.x.padding is None
                else (f"1 to {self.x.shape[0]}", *self.x.shape[1:])
            )
            raise UserError(
                what, "run.transform()", f"an array (n{''.join(f', {size}' for size in sizes)})"
            )
        return self._of(array)

    def _has_rows(self, array: np.ndarray) -> bool:
        """Whether the array has rows of the shape of x; padded rows may have any length."""
        if self.x.padding is None or array.ndim < 2:
            return array.ndim > 0 and array.shape[1:] == self.x.shape
        return array.shape[1] <= self.x.shape[0] and array.shape[2:] == self.x.shape[1:]

    def _of(self, array: np.ndarray) -> np.ndarray:
        """Transforms one array like TorchInputs, in the same dtype, with the same bits."""
        array = array[:, None] if array.ndim == 1 else array
        if not (self.is_of_images or self.is_standardized or self.fill is not None):
            return self._as_given(array)
        numbers = self._filled(array.astype(self.dtype))
        mean = self.along(self.mean).astype(self.dtype)
        std = self.along(self.std).astype(self.dtype)
        found: np.ndarray = (
            (numbers / np.asarray(255, self.dtype) if self.is_of_images else numbers) - mean
        ) / std
        return (
            np.ascontiguousarray(found.transpose(0, 3, 1, 2))
            if self.is_of_images and not self.channels_last
            else found
        )

    def _filled(self, numbers: np.ndarray) -> np.ndarray:
        if self.fill is None:
            return numbers
        return np.where(np.isnan(numbers), self.along(self.fill).astype(numbers.dtype), numbers)

    def _as_given(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "f" or not self.keeps_integers:
            return array.astype(self.dtype)
        return array.astype(np.int64) if array.dtype.kind in "iu" else array

    def flat(self, x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns rows (n, numbers) for framework=numpy, computed in float64; images are flattened
        as (C, H, W). n may be 0."""
        x = self._filled(x.astype(np.float64) / (255.0 if self.is_of_images else 1.0))
        x = ((x[:, None] if x.ndim == 1 else x) - self.along(self.mean)) / self.along(self.std)
        x = x.transpose(0, 3, 1, 2) if self.is_of_images else x
        return x.reshape(len(x), math.prod(x.shape[1:])).astype(dtype)


@dataclass(frozen=True, eq=False)
class Transforms:
    """The transform of each input field; run.transform(fields) applies them to a dict of arrays."""

    each: Mapping[str, Transform]  # in the order of the fields

    @property
    def summary(self) -> str:
        """One line that describes the transforms."""
        return "; ".join(f"{name}: {transform.summary}" for name, transform in self.each.items())

    def changed(self, change: Callable[[Transform], Transform]) -> Transforms:
        return Transforms({name: change(transform) for name, transform in self.each.items()})

    def __call__(self, fields: Any) -> dict[str, Any]:
        """Transforms the fields. Raises UserError if a field is missing or has another shape."""
        missing = [
            name for name in self.each if not isinstance(fields, Mapping) or name not in fields
        ]
        if missing:
            what = (
                f"the model was trained on the fields {', '.join(self.each)}; "
                f"{', '.join(missing)} is missing"
            )
            raise UserError(
                what,
                "run.transform()",
                f"a dict of arrays: {{{', '.join(f'{name!r}: ...' for name in self.each)}}}",
            )
        return {name: transform(fields[name]) for name, transform in self.each.items()}


def _some(numbers: np.ndarray) -> str:
    shown = [f"{number:.4g}" for number in numbers[:3].tolist()]
    return " ".join(shown) + (" ..." if len(numbers) > len(shown) else "")


def input_stats(
    source: Source,
    standardize: Standardize,
    users_model: bool,
    name: str = "x",
    channels: Channels | None = None,
) -> ColumnStats:
    """Returns the statistics of a field for a Transform: zeros and ones if the field is not
    changed.

    None: images are normalized by channel; columns (C,) and single numbers are standardized for
    models of hvdtrain, not for the user's models; other fields are not changed. True standardizes
    numbers of any shape by their last axis; "channel" by the axis `channels`; False nothing. Raises
    UserError if x has no such axis.
    """
    x = source.fields[name]
    if standardize == "channel" and channels is None:
        raise UserError(
            f"{STANDARDIZE}=channel needs maps x (C, H, W) or (H, W, C), but {name} is {x}",
            STANDARDIZE,
            f"{STANDARDIZE}=true, by the last axis",
        )
    wanted = is_scaled(x, standardize, users_model)
    if wanted and x.padding is not None:
        what = (
            f"{name} has variable-length samples, whose mean and deviation would include the "
            "padding"
        )
        raise UserError(
            what,
            STANDARDIZE,
            f"{STANDARDIZE}=false, with data that are already scaled; images as floats",
        )
    if wanted:
        return column_stats(source, name, stats_axis(standardize, channels))
    columns = x.shape[-1] if is_image(x) else 1
    return ColumnStats(np.zeros(columns), np.ones(columns))


def is_scaled(x: Field, standardize: Standardize, users_model: bool) -> bool:
    """Whether a mean is subtracted from the field."""
    if standardize is None:
        return is_image(x) or (len(x.shape) < 2 and not users_model)
    return standardize is not False


def stats_axis(standardize: Standardize, channels: Channels | None) -> Channels:
    """Returns the axis of x that its mean and deviation belong to."""
    return channels if standardize == "channel" and channels is not None else "last"


def facts_of_axis(channels: Channels) -> dict[str, str]:
    """Returns the axis of the mean and deviation for Task.facts(), if it is not the last one."""
    return {} if channels == "last" else {_AXIS: channels}


def axis_of_facts(facts: Mapping[str, Any]) -> Channels:
    """Returns the axis of facts_of_axis(). Raises ValueError for anything else."""
    found: Channels = facts.get(_AXIS, "last")
    if found not in get_args(Channels):
        raise ValueError("impossible axis of the mean")
    return found


def facts_of_fill(fill: np.ndarray | None) -> dict[str, list[float]]:
    """Returns what replaces NaN in x for Task.facts()."""
    return {} if fill is None else {_FILL: fill.tolist()}


def fill_of_facts(facts: Mapping[str, Any], x: Field, channels: Channels) -> np.ndarray | None:
    """Returns what facts_of_fill() describes. Raises TypeError or ValueError if it does not fit
    x."""
    if _FILL not in facts:
        return None
    fill = np.array(facts[_FILL], np.float64)
    check_stats(x, fill, np.ones_like(fill), channels)
    return fill


def check_stats(x: Field, mean: np.ndarray, std: np.ndarray, channels: Channels = "last") -> None:
    """Raises ValueError if these cannot be the mean and deviation of x, read from a
    checkpoint."""
    expected = x.shape[:1] if channels == "first" else (x.shape[-1:] or (1,))
    if mean.shape != std.shape or mean.shape not in {expected, (1,)}:
        raise ValueError("impossible mean or deviation")
    if not np.isfinite(mean).all() or not (np.isfinite(std) & (std > 0)).all():
        raise ValueError("impossible mean or deviation")


def transform_of_facts(facts: Mapping[str, Any]) -> Transform:
    """Returns the transform from the Task.facts() of a checkpoint. Raises KeyError, TypeError or
    ValueError if they do not contain it."""
    if "x" in facts:  # regression
        dtype, shape = facts["x"]
    elif "fields" in facts:  # a script's loss
        dtype, shape = facts["fields"]["x"][:2]
    else:
        dtype = facts.get("dtype", "uint8")
        shape = facts["shape"]
    x = Field(np.dtype(dtype).name, tuple(shape))
    if not all(type(size) is int and size >= 1 for size in x.shape):
        raise ValueError("impossible shape")
    mean, std = (
        np.array(facts.get(name, default), np.float64)
        for name, default in (("mean", [0.0]), ("std", [1.0]))
    )
    channels = axis_of_facts(facts)
    if "mean" in facts:
        check_stats(x, mean, std, channels)
    fill = fill_of_facts(facts, x, channels)
    x = x._replace(gaps=fill is not None)
    return Transform(x, mean, std, channels=channels, fill=fill)

"""Source: a data set as the trainer reads it, samples by index."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hvdtrain.core.arrays import digest, digest_as
from hvdtrain.core.progress import fold
from hvdtrain.data.channel_stats import ChannelStats, channel_stats, sampled_stats
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch


Split = Literal["train", "val"]
_LABELS = 2**20  # that are looked at at once
_MOST_AHEAD = 2**17  # samples that are known in advance: about 10 us of the processor each, once
LARGE_BYTES = 2**30  # of arrays that are not read whole at the start of a job


class Padding(NamedTuple):
    """What stands behind the rows of a sample that is shorter than another one that is read with
    it."""

    value: float
    mask: str  # the field, bool (T,), that says which rows are real; empty: this is a mask itself


_TARGETS = ("y", "label", "labels", "target", "targets")


def padded_by(field: str) -> str:
    """The words that pad a field: targets by what torch's cross_entropy() ignores, since a 0 there
    would be a class."""
    return f"data.pad={{{field}: {-100 if field in _TARGETS else 0}}}"


class Field(NamedTuple):
    """What each sample has under one name."""

    dtype: str  # as numpy calls it: "uint8", "int64", "float32"
    shape: tuple[int, ...]  # of one sample
    values: int = 0  # integers are in 0 ... values - 1; 0: any number
    ignored: int | None = (
        None  # a further value that integers may have: of samples that a task leaves out
    )
    padding: Padding | None = (
        None  # samples have 0 to shape[0] rows: a read pads to the longest that it reads
    )

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
        """Whether it says which rows of another field are real."""
        return self.padding is not None and not self.padding.mask

    def fits(self, other: Field) -> bool:
        """Whether a model for samples of this shape takes those of another field: of different
        lengths those that are not longer."""
        if self.padding is None or other.padding is None:
            return self.shape == other.shape and self.padding == other.padding
        return self.shape[1:] == other.shape[1:] and self.shape[0] >= other.shape[0]

    def facts(self) -> list[Any]:
        """Plain values of JSON, of which field_of_facts() makes it again."""
        return [
            self.dtype,
            list(self.shape),
            self.values,
            *([] if self.padding is None else [list(self.padding)]),
        ]


def field_of_facts(facts: Sequence[Any]) -> Field:
    """The field of Field.facts(). Raises TypeError or ValueError where they are none."""
    dtype, shape, values, *padding = facts
    found = Field(np.dtype(dtype).name, tuple(shape), values)
    if not padding:
        return found
    value, mask = padding[0]
    is_number = isinstance(value, (int, float)) and isinstance(mask, str)
    if len(padding) > 1 or not is_number or not shape:
        raise ValueError("impossible padding")
    return found._replace(
        padding=Padding(value, mask),
        ignored=int(value) if values and not 0 <= value < values else None,
    )


class Foresight(NamedTuple):
    """What a source can make of it that it knows which samples are read next: of neighbours that
    are decoded together it keeps some."""

    samples: int  # of the set
    rows: int  # neighbours that are decoded together
    kept: int  # samples that fit into memory

    @property
    def ahead(self) -> int:
        """Samples to know in advance, so that 0.85 of `kept` are in memory, and seldom more than
        `kept`.

        Of L next samples L^2 / (2 (L + samples / rows)) are: a block is decoded once in L + samples
        / rows reads, and what it has of the next L waits for L / 2 of them.
        """
        most = 0.85 * self.kept
        return min(
            self.samples,
            _MOST_AHEAD,
            int(most + (most**2 + 2 * most * self.samples / self.rows) ** 0.5),
        )

    @property
    def decoded(self) -> float:
        """Blocks that are decoded for one sample, with what is kept."""
        return 1 / (1 + (self.rows - 1) * self.ahead / self.samples)

    def divided(self, ranks: int) -> Foresight:
        """The foresight of each of ranks that read other blocks than the others."""
        return self._replace(samples=max(1, self.samples // ranks))


class Source(Protocol):
    """Samples by index, each with named fields: no rank, no randomness, no framework.

    One whose samples change from epoch to epoch has read_in_epochs(indices, epochs, seed) too;
    read() is then of evaluations.
    """

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields of every sample."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch:
        """{name: array (n, *shape)} for each field, in fresh arrays. Safe to call from several
        threads.

        Raises UserError for a damaged sample.
        """

    def digests(self, seed: int) -> dict[str, str]:
        """64 bits over the samples in their order, as 16 hex digits, by what they are of: "labels",
        "images".

        Of all samples, or where that takes long of some that the seed draws.
        """

    def identity(self) -> dict[str, str]:
        """Digests that do not depend on a seed: what a checkpoint keeps, to know the data again."""


@runtime_checkable
class LabelledImages(Source, Protocol):
    """A source of {"x": uint8 (n, H, W, C), "y": int64 (n,)}: images, each with the number of its
    class."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every image."""

    @property
    def classes(self) -> int: ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class; empty where the data set has none."""

    def labels(self) -> np.ndarray:
        """int64 (n,): the label of every sample, without reading an image."""

    def stats(self) -> ChannelStats:
        """Mean and standard deviation of x / 255: the same bits on all ranks."""

    def label_digest(self) -> str:
        """64 bits over all labels in their order, as 16 hex digits."""

    def image_digest(self, seed: int) -> str:
        """64 bits over the images in their order: all of them, or where that takes long some that
        the seed draws."""


class ImagesBase:
    """What labelled images have where they do not say otherwise: digests of all labels and of some
    images, statistics of at most 2,000."""

    @property
    def fields(self: LabelledImages) -> dict[str, Field]:
        return {"x": Field("uint8", self.shape), "y": Field("int64", (), self.classes)}

    def stats(self: LabelledImages) -> ChannelStats:
        return sampled_stats(self)

    def label_digest(self: LabelledImages) -> str:
        return digest_of_labels(self.labels())

    def image_digest(self: LabelledImages, seed: int) -> str:
        return digest_of_some(self, seed)

    def digests(self: LabelledImages, seed: int) -> dict[str, str]:
        return {"labels": self.label_digest(), "images": self.image_digest(seed)}

    def identity(self: LabelledImages) -> dict[str, str]:
        return {"labels": self.label_digest()}


class AroundSource:
    """What a source that wraps another one takes from it: all but reading."""

    source: Source

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.source.fields

    def __len__(self) -> int:
        return len(self.source)

    def digests(self, seed: int) -> dict[str, str]:
        return self.source.digests(seed)

    def identity(self) -> dict[str, str]:
        return self.source.identity()

    def known_stats(self, name: str, indices: np.ndarray | None = None) -> np.ndarray | None:
        return known_stats(self.source, name, indices)

    def known_lengths(self, name: str) -> np.ndarray | None:
        return known_lengths(self.source, name)

    @property
    def foresight(self) -> Foresight | None:
        return foresight(self.source)

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        expect(self.source, indices, anew)

    @property
    def reads_from_memory(self) -> bool:
        return reads_from_memory(self.source)

    @property
    def reads_in_process(self) -> bool:
        return reads_in_process(self.source)

    @property
    def notes(self) -> tuple[str, ...]:
        return notes_of(self.source)

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        return nested_inputs(self.source)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.source, "class_names", ()))


_DIGEST_IMAGES = 64
_DIGEST_VALUES = 2**24  # at most: 0.1 s of large JPEG files
_DRAWN = 0x64726177  # a stream of counters apart from those of the sampler


def digest_of_some(source: LabelledImages, seed: int) -> str:
    """A digest of at most 64 images and their labels, fewer of large ones: drawn by counters, equal
    on all ranks."""
    most = max(1, min(_DIGEST_IMAGES, _DIGEST_VALUES // math.prod(source.shape)))
    drawn = fold(seed, _DRAWN, np.arange(most, dtype=np.uint64)) % np.uint64(len(source))
    batch = source.read(np.unique(drawn).astype(np.int64))
    return digest({"x": batch["x"], "y": batch["y"]})


@dataclass(frozen=True, eq=False)
class NamedArrays:
    """A source of arrays (n, ...) of any type and shape, in memory or memory-mapped: one for each
    field.

    Raises UserError where they do not have the same samples, an integer is outside of 0 ... values
    - 1, or a number is not finite: of more than LARGE_BYTES when a sample is read.
    """

    arrays: Mapping[str, np.ndarray]
    # Field.values of the integer fields that have a bound
    values: Mapping[str, int] = field(default_factory=dict)
    where: str = ""  # a path or a name, for messages
    ignored: Mapping[str, int] = field(default_factory=dict)  # Field.ignored, where it is set
    nested_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(array) if array.ndim else -1 for name, array in self.arrays.items()}
        if not lengths or min(lengths.values()) < 0 or len(set(lengths.values())) > 1:
            shown = (
                ", ".join(f"{name} {_describe(array)}" for name, array in self.arrays.items())
                or "none"
            )
            raise UserError(
                f"the arrays do not have the same samples: {shown}",
                self.where,
                "one row of each array for each sample",
            )
        for name, array in self.arrays.items():
            check_numbers(
                name, array[:0] if self.is_large else array, self.fields[name], self.where
            )

    @property
    def fields(self) -> dict[str, Field]:
        return {
            name: Field(
                str(array.dtype), array.shape[1:], self.values.get(name, 0), self.ignored.get(name)
            )
            for name, array in self.arrays.items()
        }

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: np.ndarray) -> Batch:
        batch = {name: np.array(array[indices]) for name, array in self.arrays.items()}
        if self.is_large:
            for name, array in batch.items():
                check_numbers(name, array, self.fields[name], self.where, indices)
        return batch

    def known_labels(self) -> np.ndarray | None:
        y = self.arrays.get("y")
        return y if y is not None and y.ndim == 1 and y.dtype.kind in "iub" else None

    def digests(self, seed: int) -> dict[str, str]:
        """Digests of all arrays, 0.1 s for 200 MB; of large ones of some samples."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        rows = _rows_of_digest(len(self)) if self.is_large else slice(None)
        return {
            "arrays": digest(
                {name: np.ascontiguousarray(array[rows]) for name, array in self.arrays.items()}
            )
        }

    @property
    def is_large(self) -> bool:
        """Whether reading all of it at the start would take long: its numbers are then checked when
        they are read."""
        return sum(array.nbytes for array in self.arrays.values()) > LARGE_BYTES


def _rows_of_digest(samples: int) -> np.ndarray:
    """At most 4,096, always the same."""
    return np.unique(fold(np.arange(4096, dtype=np.uint64)) % np.uint64(samples)).astype(np.int64)


def check_numbers(
    name: str, array: np.ndarray, field: Field, where: str, samples: np.ndarray | None = None
) -> None:
    """Raises UserError where one is not finite, or is no integer that the field may have; reads
    about 16 MB at once.

    samples: the numbers of the rows, for the message; None: from 0 on.
    """
    if array.dtype.kind not in "iufb":
        raise UserError(
            f"field {name} is {_describe(array)}, expected numbers",
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


@dataclass(frozen=True, eq=False)
class ArraySource(ImagesBase):
    """A source in memory, or in a memory-mapped file. Raises UserError where the arrays are not as
    described."""

    x: np.ndarray  # uint8 (n, H, W, C)
    y: np.ndarray  # integers (n,), each in 0..classes-1
    classes: int
    where: str = ""  # a path or a name, for messages
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # for the user

    def __post_init__(self) -> None:
        if self.x.dtype != np.uint8 or self.x.ndim != 4 or 0 in self.x.shape:
            raise UserError(
                f"images are {_describe(self.x)}, expected uint8 (n, H, W, C) with no dimension 0",
                self.where,
            )
        if self.y.dtype.kind not in "iu" or self.y.shape != self.x.shape[:1]:
            raise UserError(
                f"labels are {_describe(self.y)}, expected integers ({len(self.x)},), one for "
                "each image",
                self.where,
            )
        first = first_outside(self.y, self.classes)
        if first is not None:
            raise UserError(
                f"label {self.y[first]} of sample {first} is outside 0..{self.classes - 1}",
                self.where,
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.x.shape[1:]
        return height, width, channels

    def __len__(self) -> int:
        return len(self.x)

    def labels(self) -> np.ndarray:
        return self.y

    def read(self, indices: np.ndarray) -> Batch:
        return {"x": self.x[indices], "y": read_labels(self.y, indices)}

    def stats(self) -> ChannelStats:
        """Exact over all samples; about 1 s for 200 million values."""
        return channel_stats(self.x)

    def image_digest(self, seed: int) -> str:
        """A digest of all images: 0.1 s for 200 million values."""
        return digest({"x": self.x})


def digest_of_labels(y: np.ndarray) -> str:
    """A digest of integers (n,), the same for any type: 0.02 s for ten million labels."""
    return digest_as("<i8", "y", y)


def first_outside(y: np.ndarray, classes: int) -> int | None:
    """Which of the labels, integers (n,), is the first that is not in 0..classes-1; a piece at a
    time: they may be mapped from a file."""
    for start in range(0, len(y), _LABELS):
        part = y[start : start + _LABELS]
        wrong = np.flatnonzero((part < 0) | (part >= classes))
        if len(wrong):
            return start + int(wrong[0])
    return None


def read_labels(y: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The labels of some samples, as a batch has them: int64. All of them are kept in the type that
    the data have."""
    return y[indices].astype(np.int64, copy=False)


def smallest(y: np.ndarray) -> np.ndarray:
    """Integers (n,) in the smallest type that has them: a byte for each label of up to 256
    classes."""
    return (
        y.astype(np.result_type(np.min_scalar_type(y.min()), np.min_scalar_type(y.max())))
        if len(y)
        else y
    )


def arrays_in_memory(source: Source) -> Mapping[str, np.ndarray] | None:
    """The whole arrays of a source by field, where reading a sample is a copy from them; else
    None."""
    if isinstance(source, ArraySource):
        return {"x": source.x, "y": source.y.astype(np.int64, copy=False)}
    return source.arrays if isinstance(source, NamedArrays) else None


def known_labels(source: Source) -> np.ndarray | None:
    """Integers (n,), the field y of every sample, where no sample has to be read for them; else
    None."""
    if isinstance(source, LabelledImages):
        return source.labels()
    method = getattr(source, "known_labels", None)
    found: np.ndarray | None = None if method is None else method()
    return found


def known_lengths(source: Source, name: str) -> np.ndarray | None:
    """int64 (n,): how many rows of a field each sample has, where they differ and no sample has to
    be read for them; else None."""
    method = getattr(source, "known_lengths", None)
    found: np.ndarray | None = None if method is None else method(name)
    return found


def known_stats(source: Source, name: str, indices: np.ndarray | None = None) -> np.ndarray | None:
    """Mean and deviation of a field over all samples, or some, float64 (2, C) by its last axis,
    where the source knows them; else None."""
    method = getattr(source, "known_stats", None)
    found: np.ndarray | None = None if method is None else method(name, indices)
    return found


def read_in_epochs(source: Source, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
    """The samples as they are trained on in these epochs, int64 (n,): a source whose samples change
    with the epoch has this as a method."""
    method = getattr(source, "read_in_epochs", None)
    found: Batch = source.read(indices) if method is None else method(indices, epochs, seed)
    return found


def foresight(source: Source) -> Foresight | None:
    """What the source makes of samples that it knows of in advance, by expect(); None where it
    reads no faster with them."""
    found: Foresight | None = getattr(source, "foresight", None)
    return found


def expect(source: Source, indices: np.ndarray, anew: bool) -> None:
    """Tells a source with foresight() that these samples, int64 (n,), will be read after all that
    were told; anew: no others will be.

    What is read does not depend on it, only how fast. A sample is told as often as it will be read.
    """
    source.expect(indices, anew)  # type: ignore[attr-defined]


def reads_from_memory(source: Source) -> bool:
    """Whether reading a sample is a copy from memory: a source of arrays, or one that says so."""
    return arrays_in_memory(source) is not None or bool(getattr(source, "reads_from_memory", False))


def notes_of(source: Source) -> tuple[str, ...]:
    """Lines for the user."""
    return tuple(getattr(source, "notes", ()))


def nested_inputs(source: Source) -> tuple[str, ...]:
    """The fields that the data have inside of x, as {"x": {"image": ..., "table": ...}}: inputs of
    a model."""
    return tuple(getattr(source, "nested_inputs", ()))


def crops_at_random(source: Source) -> bool:
    """Whether read_in_epochs() gives random boxes of whole images, for augment.resized_crop: such a
    batch is not cropped again."""
    return bool(getattr(source, "crops_at_random", False))


def reads_in_process(source: Source) -> bool:
    """Whether reading runs the user's own code in this process: then on the thread that needs the
    samples, and on no other."""
    return bool(getattr(source, "reads_in_process", False))


def check_indices(indices: np.ndarray, samples: int) -> None:
    """Raises IndexError where an index is not in 0 ... samples - 1."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < samples:
        raise IndexError(f"samples {indices.min()}..{indices.max()} of {samples}")


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"

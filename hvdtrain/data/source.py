"""Source: the interface through which the trainer reads samples by index."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.progress import fold
from hvdtrain.data.channel_stats import ChannelStats, channel_stats, sampled_stats
from hvdtrain.data.field import Channels, Field, check_numbers, describe
from hvdtrain.data.labels import digest_of_labels, first_outside, read_labels
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from hvdtrain.core.arrays import Batch
    from hvdtrain.data.grid import Grid
    from hvdtrain.data.sampler import Order

Split = Literal["train", "val"]
_MOST_AHEAD = 2**17  # samples known in advance: each costs about 10 us of CPU time, once
LARGE_BYTES = 2**30  # size from which arrays are not read completely at the start of a job


class Foresight(NamedTuple):
    """How a source can use advance knowledge of the samples to be read: it keeps some samples that
    are decoded together."""

    samples: int  # samples in the set
    rows: int  # neighbouring samples that are decoded together
    kept: int  # samples that fit into memory

    @property
    def ahead(self) -> int:
        """Returns how many samples to know in advance, so that about 0.85 of `kept` are in memory
        and rarely more than `kept`.

        With L samples known in advance, L^2 / (2 (L + samples / rows)) are in memory. A block is
        decoded once in L + samples / rows reads, and its samples among the next L wait for L / 2
        reads on average.
        """
        most = 0.85 * self.kept
        return min(
            self.samples,
            _MOST_AHEAD,
            int(most + (most**2 + 2 * most * self.samples / self.rows) ** 0.5),
        )

    @property
    def decoded(self) -> float:
        """Returns the number of blocks that are decoded per sample, given the samples that are
        kept."""
        return 1 / (1 + (self.rows - 1) * self.ahead / self.samples)

    def divided(self, ranks: int) -> Foresight:
        """Returns the foresight of one rank if all ranks read different blocks."""
        return self._replace(samples=max(1, self.samples // ranks))


class Pictures(Protocol):
    """How to display tokens that are the pixels of images."""

    @property
    def values(self) -> int:
        """The tokens of pixels are 0 to values - 1."""

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the pixels, uint8 (..., C), of integer tokens (...)."""


class Source(ABC):
    """Samples by index, each with named fields. A source knows no rank, no randomness and no
    framework.

    Every source implements the abstract members. The defaults of the other members assume that
    nothing is known about samples before they are read.
    """

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """The fields of every sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: np.ndarray) -> Batch:
        """Reads samples: {name: array (n, *shape)} for each field, in new arrays. Safe to call from
        several threads.

        Raises UserError for a damaged sample.
        """

    @abstractmethod
    def digests(self, seed: int) -> dict[str, str]:
        """Returns 64-bit digests of the samples in order, as 16 hex digits, by what they cover:
        "labels", "images".

        They cover all samples or, if that takes too long, some samples drawn by the seed.
        """

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Returns digests that do not depend on a seed; a checkpoint keeps them to recognize the
        data."""

    if TYPE_CHECKING:  # a field in dataclasses, where a property would become its default

        @property
        def where(self) -> str:
            """The path or name of the source, for messages; empty if it has none."""

        @property
        def class_names(self) -> tuple[str, ...]:
            """The name of each class y; empty if the data have no names."""

        @property
        def columns(self) -> Mapping[str, Sequence[str]]:
            """The column names of each field, for tables with a header; empty for other data."""
    else:
        where = ""
        class_names = ()
        columns = MappingProxyType({})

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        """Reads samples for training in these epochs, int64 (n,). If samples change from epoch to
        epoch, read() returns them as for evaluation."""
        return self.read(indices)

    @property
    def crops_at_random(self) -> bool:
        """Whether read_in_epochs() gives random boxes of whole images, for augment.resized_crop:
        such a batch is not cropped again."""
        return False

    def known_labels(self) -> np.ndarray | None:
        """Returns integers (n,), the field y of every sample, if it is available without reading
        samples."""
        return None

    def known_lengths(self, name: str) -> np.ndarray | None:
        """Returns int64 (n,), the number of rows of a field in each sample, if it varies and is
        known without reading samples."""
        return None

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        """Returns mean and deviation of a field over all or some samples, float64 (2, C) along the
        axis of its channels, if the source knows them."""
        return None

    def known_grid(self, text: str) -> Grid | None:
        """Returns the axes of an array of the file with their coordinates, cut as data.fields cuts
        it, such as "/u[:, 0:3]"; None if there are several files, or none with such an array."""
        return None

    def known_array(self, name: str) -> np.ndarray | None:
        """Returns an array of the files that is not one of samples, such as a coordinate; None if
        there are no such files."""
        return None

    @property
    def foresight(self) -> Foresight | None:
        """Returns how the source uses samples that expect() announced; None if it does not read
        faster with them."""
        return None

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        """Announces to a source with foresight that these samples, int64 (n,), will be read after
        all announced before. anew: the samples replace all announced before.

        It changes only the speed of reading, not the samples. A sample is announced as often as it
        will be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has a foresight and no expect()")

    @property
    def reads_from_memory(self) -> bool:
        """Whether reading a sample is a copy from memory."""
        return False

    @property
    def reads_any_sample(self) -> bool:
        """Whether read() can read every sample. Otherwise it returns some that look like them, and
        only read_in_epochs() reads."""
        return True

    @property
    def reads_array_files(self) -> bool:
        """Whether it is one of ArrayFiles; array_files_in() looks for it."""
        return False

    def with_gaps(self, names: Collection[str]) -> Source:
        """Returns the source with Field.gaps in these fields, if it checks numbers when it reads
        them; else the same source."""
        return self

    def read_by(self, workers: int) -> Source:
        """Returns the source with `workers` processes that read its files."""
        raise NotImplementedError(f"{type(self).__name__} has no files for data.workers")

    def cropped(self, smallest_box: float) -> Source:
        """Returns the source with random crops of at least this share of an image, if it can read
        them; else the same source."""
        return self

    @property
    def is_measured(self) -> bool:
        """Whether all ranks measure the samples together when the data are opened; the same on
        every rank."""
        return False

    def measure(self, rank: int, size: int) -> np.ndarray:
        """Measures this rank's part of the samples: integers (samples of the part, ...). Raises
        UserError for a damaged sample."""
        raise NotImplementedError(f"{type(self).__name__} measures nothing")

    def with_measures(self, measured: np.ndarray) -> Source:
        """Returns the source with what all ranks measured, in rank order."""
        raise NotImplementedError(f"{type(self).__name__} measures nothing")

    @property
    def takes_class_names(self) -> bool:
        """Whether its targets may be the names of classes, beside numbers."""
        return False

    def with_answers(self) -> Source:
        """Returns the source with the field answers, which marks the tokens of the assistant's
        answers in a chat; the same source if it has no chats."""
        return self

    @property
    def moved_masks(self) -> tuple[str, ...]:
        """The mask fields whose pixels move with x, or are pasted by CutMix."""
        return ()

    @property
    def order(self) -> Order | None:
        """The order in which a job trains on the samples, if the data decide it; None: data.shuffle
        does."""
        return None

    def each_part(self, change: Callable[[Source, str, int], Source]) -> Source:
        """Returns the source with a change to each of the data sets that it mixes, which gets the
        part, its name and the number of its first sample. By default the source is one part without
        a name."""
        return change(self, "", 0)

    @property
    def has_encoded_columns(self) -> bool:
        """Whether it wraps a table with encoded columns, or is a part of one."""
        return False

    @property
    def is_users_dataset(self) -> bool:
        """Whether the samples come from the user's Dataset, whose integers may be of any type."""
        return False

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> Source:
        """Returns the source with the longest samples and the largest values of padded fields that
        another source has; the same source if it has no such fields."""
        return self

    @property
    def reads_in_process(self) -> bool:
        """Whether reading runs user code in this process. Then only the thread that needs the
        samples reads them."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user."""
        return ()

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        """The fields nested in x, as in {"x": {"image": ..., "table": ...}}; they are inputs of the
        model."""
        return ()

    @property
    def hooks(self) -> tuple[Any, ...]:
        """Hooks of the trainer's loop, for what a checkpoint must know about the samples."""
        return ()

    @property
    def pictures(self) -> Pictures | None:
        """How to display tokens that are pixels of images; else None."""
        return None

    @property
    def run_files(self) -> Mapping[str, bytes]:
        """name -> content of the files that a run folder keeps because the samples depend on
        them."""
        return {}


class LabelledImages(Source):
    """A source of {"x": uint8 (n, H, W, C), "y": int64 (n,)}: images with class numbers.

    By default, digests cover all labels and some images, and statistics at most 2,000 images.
    """

    if TYPE_CHECKING:  # at run time a dataclass would use these as defaults of its fields

        @property
        def shape(self) -> tuple[int, int, int]:
            """(H, W, C) of every image."""

        @property
        def classes(self) -> int: ...

    @abstractmethod
    def labels(self) -> np.ndarray:
        """Returns the label of every sample, int64 (n,), without reading an image."""

    @property
    def fields(self) -> Mapping[str, Field]:
        return {"x": Field("uint8", self.shape), "y": Field("int64", (), self.classes)}

    def known_labels(self) -> np.ndarray:
        return self.labels()

    def stats(self) -> ChannelStats:
        """Returns mean and standard deviation of x / 255; the bits are the same on all ranks."""
        return sampled_stats(self)

    def label_digest(self) -> str:
        """Returns a 64-bit digest of all labels in order, as 16 hex digits."""
        return digest_of_labels(self.labels())

    def image_digest(self, seed: int) -> str:
        """Returns a 64-bit digest of the images in order: of all or, if that takes too long, of
        some drawn by the seed."""
        return digest_of_some(self, seed)

    def digests(self, seed: int) -> dict[str, str]:
        return {"labels": self.label_digest(), "images": self.image_digest(seed)}

    def identity(self) -> dict[str, str]:
        return {"labels": self.label_digest()}


_DIGEST_IMAGES = 64
_DIGEST_VALUES = 2**24  # at most; decoding large JPEG files takes 0.1 s
_DRAWN = 0x64726177  # a stream of counters, distinct from the sampler's


def digest_of_some(source: LabelledImages, seed: int) -> str:
    """Returns a digest of at most 64 images and their labels, or fewer if images are large. They
    are drawn by counters, equal on all ranks."""
    most = max(1, min(_DIGEST_IMAGES, _DIGEST_VALUES // math.prod(source.shape)))
    drawn = fold(seed, _DRAWN, np.arange(most, dtype=np.uint64)) % np.uint64(len(source))
    batch = source.read(np.unique(drawn).astype(np.int64))
    return digest({"x": batch["x"], "y": batch["y"]})


@dataclass(frozen=True, eq=False)
class NamedArrays(Source):
    """A source of one array (n, ...) for each field, of any dtype and shape, in memory or
    memory-mapped.

    Raises UserError if the numbers of samples differ, an integer is outside of 0 ... values - 1, or
    a number is not finite. Arrays of more than LARGE_BYTES are checked when a sample is read.
    """

    arrays: Mapping[str, np.ndarray]
    # Field.values of the integer fields that have a bound
    values: Mapping[str, int] = field(default_factory=dict)
    where: str = ""  # a path or a name, for messages
    ignored: Mapping[str, int] = field(default_factory=dict)  # Field.ignored, if it is set
    nested_inputs: tuple[str, ...] = ()
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # for fields from DataFrames
    gaps: frozenset[str] = frozenset()  # the fields with Field.gaps
    reads_from_memory = True

    def __post_init__(self) -> None:
        lengths = {name: len(array) if array.ndim else -1 for name, array in self.arrays.items()}
        if not lengths or min(lengths.values()) < 0 or len(set(lengths.values())) > 1:
            shown = (
                ", ".join(f"{name} {describe(array)}" for name, array in self.arrays.items())
                or "none"
            )
            raise UserError(
                f"the arrays do not have the same samples: {shown}",
                self.where,
                "arrays with one row for each sample",
            )
        for name, array in self.arrays.items():
            check_numbers(
                name, array[:0] if self.is_large else array, self.fields[name], self.where
            )

    @property
    def fields(self) -> dict[str, Field]:
        return {
            name: Field(
                str(array.dtype),
                array.shape[1:],
                self.values.get(name, 0),
                self.ignored.get(name),
                gaps=name in self.gaps,
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
        """Returns digests of all arrays (0.1 s for 200 MB); for large arrays, digests of some
        samples."""
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
        """Whether reading everything at the start would take too long; values are then checked when
        they are read."""
        return sum(array.nbytes for array in self.arrays.values()) > LARGE_BYTES


def _rows_of_digest(samples: int) -> np.ndarray:
    """Returns at most 4,096 rows, the same in every call."""
    return np.unique(fold(np.arange(4096, dtype=np.uint64)) % np.uint64(samples)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class ArraySource(LabelledImages):
    """A source in memory or in a memory-mapped file. Raises UserError if the arrays do not have the
    dtypes and shapes below."""

    x: np.ndarray  # uint8 (n, H, W, C)
    y: np.ndarray  # integers (n,), each in 0..classes-1
    classes: int
    where: str = ""  # a path or a name, for messages
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # for the user
    reads_from_memory = True

    def __post_init__(self) -> None:
        if self.x.dtype != np.uint8 or self.x.ndim != 4 or 0 in self.x.shape:
            raise UserError(
                f"images are {describe(self.x)}, expected uint8 (n, H, W, C) with no dimension 0",
                self.where,
            )
        if self.y.dtype.kind not in "iu" or self.y.shape != self.x.shape[:1]:
            raise UserError(
                f"labels are {describe(self.y)}, expected integers ({len(self.x)},), one for "
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
        """Computes exact statistics over all samples; takes about 1 s for 200 million values."""
        return channel_stats(self.x)

    def image_digest(self, seed: int) -> str:
        """Returns a digest of all images; takes 0.1 s for 200 million values."""
        return digest({"x": self.x})


def arrays_in_memory(source: Source) -> Mapping[str, np.ndarray] | None:
    """Returns the arrays of a source by field, if reading a sample is a copy from them; else
    None."""
    if isinstance(source, ArraySource):
        return {"x": source.x, "y": source.y.astype(np.int64, copy=False)}
    return source.arrays if isinstance(source, NamedArrays) else None


def check_indices(indices: np.ndarray, samples: int) -> None:
    """Raises IndexError if an index is not in 0 ... samples - 1."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < samples:
        raise IndexError(f"samples {indices.min()}..{indices.max()} of {samples}")


class Unfinished(ABC):
    """The result of build() if the samples depend on an array that is computed from the training
    samples, such as a codebook.

    Rank 0 computes the array once (training/common_array.py), and Source.run_files keeps it.
    """

    array: ClassVar[str]  # the name under which ranks broadcast it

    @abstractmethod
    def compute(self) -> np.ndarray:
        """Computes the array from these samples. Raises UserError."""

    @abstractmethod
    def read(self, run: Path) -> np.ndarray:
        """Reads the array from a run folder. Raises UserError if it is absent or damaged."""

    @abstractmethod
    def finish(self, array: np.ndarray) -> Source: ...

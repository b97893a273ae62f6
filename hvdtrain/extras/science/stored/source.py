"""StoredSource: fields of samples from arrays in files. A read decodes each block once, and a cache
keeps recent blocks."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.progress import fold
from hvdtrain.data.array_files import ReadingRanks, name_and_words
from hvdtrain.data.field import Channels, Field, channel_count, check_numbers
from hvdtrain.data.grid import Grid
from hvdtrain.data.labels import smallest
from hvdtrain.data.source import Foresight, Source, check_indices
from hvdtrain.data.worker_pool import WorkerPool
from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.ahead import SamplesAhead
from hvdtrain.extras.science.stored.cache import BlockCache
from hvdtrain.extras.science.stored.selection import Selection, select
from hvdtrain.extras.science.stored.statistics import kept, mean_and_std
from hvdtrain.extras.science.stored.stored_array import Blocks, PlainRows, StoredArray, StoredFile

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_DIGEST_PLACES = 8
_DIGEST_ROWS = 16
_DIGEST_VALUES = 2**22
_KEPT = 0.875  # share of the memory for samples that are read later; the rest is for blocks
_DRAWN = 0x73746F72  # a separate stream of counters from the sampler's


@dataclass(frozen=True, eq=False)
class Selected:
    """Part of a stored array; `key` identifies its blocks in the cache."""

    array: StoredArray
    selection: Selection
    dtype: np.dtype[Any]  # dtype that rows are converted to
    key: int
    text: str  # its text in data.fields
    where: str  # its file

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        inside = zip(self.selection.inside, self.selection.box.shape, strict=True)
        return tuple(
            size if isinstance(part, slice) else len(part)
            for part, size in inside
            if not isinstance(part, int)
        )

    @property
    def rows_of_block(self) -> int:
        """The number of samples in the largest block; 1 if each is read by itself."""
        return (
            1
            if isinstance(self.array, PlainRows)
            else int(np.diff(self.array.edges).max()) // self.selection.step
        )

    def block_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the block of each sample, int64 (n,)."""
        assert not isinstance(self.array, PlainRows)
        rows = self.selection.first + samples * self.selection.step
        return np.searchsorted(self.array.edges, rows, "right") - 1

    def read_into(self, out: np.ndarray, samples: np.ndarray, cache: BlockCache) -> None:
        """Reads ascending samples, int64 (n,), into out (n, *shape)."""
        rows = self.selection.first + samples * self.selection.step
        if isinstance(self.array, PlainRows):
            box = self.selection.box
            out[:] = self._converted(
                self.selection.pick(self.array.read(rows)[(slice(None), *box.slices)])
            )
            return
        blocks = self.block_of(samples)
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            number = int(blocks[start])
            block = cache.get((self.key, number), partial(self._decode, self.array, number))
            out[start:end] = block[rows[start:end] - self.array.edges[number]]

    def _decode(self, array: Blocks, block: int) -> np.ndarray:
        return np.ascontiguousarray(
            self._converted(self.selection.pick(array.decode(block, self.selection.box)))
        )

    def _converted(self, rows: np.ndarray) -> np.ndarray:
        """Converts rows to the field's dtype. Raises UserError if that would change a value of an
        integer field."""
        with np.errstate(invalid="ignore"):
            converted = rows.astype(self.dtype, copy=False)
        if (
            self.dtype.kind in "iub"
            and self.dtype != rows.dtype
            and (wrong := converted != rows).any()
        ):
            what = f"{self.text} has {rows[wrong].flat[0]}, which {self.dtype} cannot represent"
            raise UserError(
                what, self.where, "leave this field out of data.dtypes, or correct the data"
            )
        return converted


@dataclass(frozen=True, eq=False)
class FileSamples:
    """Samples of one file: for each field one array, or several stacked along a new axis after the
    samples."""

    samples: int
    arrays: Mapping[str, tuple[Selected, ...]]

    @property
    def largest(self) -> Selected | None:
        """Returns the array with the largest blocks; None if all are read row by row."""
        stored = [
            one
            for arrays in self.arrays.values()
            for one in arrays
            if not isinstance(one.array, PlainRows)
        ]
        return max(
            stored, key=lambda one: one.rows_of_block * math.prod(one.array.shape[1:]), default=None
        )


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """The part of a source that a worker process has: files in order, read by index."""

    fields: Mapping[str, Field]
    parts: tuple[FileSamples, ...]
    name: str  # for messages
    cache: BlockCache
    # changes with the name, size and time of each file, and with the selected fields; empty for
    # folders, whose changes cannot be detected
    key: str = ""
    defined_at = "hvdtrain/extras/science/stored"

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum([part.samples for part in self.parts])

    def read_into(
        self, arrays: Mapping[str, np.ndarray], indices: np.ndarray, seeds: np.ndarray | None
    ) -> None:
        """Implements Readable.read_into(); samples are the same in every epoch."""
        order = np.argsort(indices, kind="stable")
        rising = indices[order]
        ends = self.ends
        edges = np.searchsorted(rising, [0, *ends])
        for name, field_ in self.fields.items():
            found = np.empty((len(indices), *field_.shape), field_.dtype)
            for part, first, last, end in zip(self.parts, edges, edges[1:], ends, strict=False):
                if first < last:
                    self._read_part(
                        found[first:last], part, name, rising[first:last] - (end - part.samples)
                    )
            if found.dtype == np.uint64:
                check_numbers(name, found, field_, self.name, rising)
            arrays[name][order] = found

    def blocks_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the number of the largest block of each sample, int64 (n,); -1 if samples are
        read individually."""
        blocks = np.full(len(samples), -1, np.int64)
        ends = self.ends
        parts = np.searchsorted(ends, samples, "right")
        for number in np.unique(parts).tolist():
            if (largest := self.parts[number].largest) is None:
                continue
            inside = parts == number
            rows = samples[inside] - (ends[number] - self.parts[number].samples)
            blocks[inside] = largest.block_of(rows) * len(self.parts) + number
        return blocks

    @property
    def bytes_of_sample(self) -> int:
        return sum(
            math.prod(kind.shape) * np.dtype(kind.dtype).itemsize for kind in self.fields.values()
        )

    def _read_part(
        self, out: np.ndarray, part: FileSamples, name: str, samples: np.ndarray
    ) -> None:
        arrays = part.arrays[name]
        stored = arrays[0].shape if len(arrays) == 1 else (len(arrays), *arrays[0].shape)
        if stored != out.shape[1:]:  # images (C, H, W)
            out = out.transpose(0, 3, 1, 2)
        for channel, array in enumerate(arrays):
            array.read_into(out if len(arrays) == 1 else out[:, channel], samples, self.cache)


@dataclass(frozen=True, eq=False)
class StoredSource(Source):
    """Samples of files, read when a step needs them. A read decodes a block once, even if it needs
    several samples of it.

    At most cache.most_bytes of decoded blocks stay in memory, in addition to blocks being read.
    """

    samples: StoredSamples
    notes: tuple[str, ...] = ()  # for the user
    pool: WorkerPool | None = None
    class_names: tuple[str, ...] = ()  # names of the classes y, if the files have names
    # columns of each field of a table, without data.fields
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    file: StoredFile | None = None  # the first one, for its coordinates
    # results that are computed once: labels, the digest
    _known: dict[str, Any] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.samples.fields

    @property
    def where(self) -> str:
        return self.samples.name

    @property
    def reads_array_files(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self.samples.ends[-1])

    @property
    def cache_bytes(self) -> int:
        return self.samples.cache.most_bytes

    @property
    def bytes_of_sample(self) -> int:
        return self.samples.bytes_of_sample

    def with_gaps(self, names: Collection[str]) -> StoredSource:
        fields = {
            name: field._replace(gaps=True) if name in names else field
            for name, field in self.fields.items()
        }
        return replace(self, samples=replace(self.samples, fields=fields))

    def read_by(self, workers: int) -> StoredSource:
        """Returns the source read by `workers` processes, each with a part of the cache."""
        share = 1 - _KEPT if self.foresight else 1
        cache = BlockCache(int(self.samples.cache.most_bytes * share) // workers)
        return replace(self, pool=WorkerPool(replace(self.samples, cache=cache), workers))

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        ahead: SamplesAhead | None = self._known.get("ahead")
        return self._read(indices) if ahead is None or not len(indices) else ahead.read(indices)

    @property
    def foresight(self) -> Foresight | None:
        """Returns None if everything fits into memory, or if knowing samples in advance would not
        save decoding."""
        foresight: Foresight | None = self._once("foresight", self._foresight)
        return foresight

    def _foresight(self) -> Foresight | None:
        need = self._need
        fits = self.samples.cache.most_bytes / self.samples.bytes_of_sample
        return (
            need
            if need.rows > 1 and need.samples > fits and need.decoded < 1 - fits / need.samples
            else None
        )

    def decodes_of_block(self, own: bool) -> float:
        """Estimates how often a block is decoded in an epoch of a full shuffle. own: whether each
        rank reads different blocks."""
        need = self._need
        fits = self.samples.cache.most_bytes / self.samples.bytes_of_sample
        if self.foresight is None:
            return need.rows * max(0.0, 1 - fits / need.samples)
        ranks: ReadingRanks | None = self._known.get("ranks")
        return need.rows * need.divided(ranks.size if own and ranks else 1).decoded

    @property
    def _need(self) -> Foresight:
        kept = int(_KEPT * self.samples.cache.most_bytes) // self.samples.bytes_of_sample
        return Foresight(len(self), self.rows_of_block or 1, kept)

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        """See Source.expect(). The first call divides the memory between these samples and
        blocks."""
        self._once("ahead", self._begin_ahead).expect(indices, anew)

    def _begin_ahead(self) -> SamplesAhead:
        self.samples.cache.leave_room(1 - _KEPT)
        return SamplesAhead(self._need.kept, self.samples.blocks_of, self._read)

    def _read(self, indices: np.ndarray) -> Batch:
        if self.pool is None:
            batch = {
                name: np.empty((len(indices), *kind.shape), kind.dtype)
                for name, kind in self.fields.items()
            }
            self.samples.read_into(batch, indices, None)
            return batch
        # each worker gets neighbouring samples, so that few blocks are decoded by two workers
        order = np.argsort(indices, kind="stable")
        return {
            name: _unsorted(rows, order)
            for name, rows in self.pool.read(indices[order], None).items()
        }

    def read_field(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Reads one field of samples, in this process."""
        alone = replace(self.samples, fields={name: self.fields[name]})
        found = {name: np.empty((len(indices), *self.fields[name].shape), self.fields[name].dtype)}
        alone.read_into(found, indices, None)
        return found[name]

    def known_labels(self) -> np.ndarray | None:
        """Returns all of y if it is one integer for each sample; reads it once."""
        y = self.fields.get("y")
        if y is None or y.shape or np.dtype(y.dtype).kind not in "iub":
            return None
        return np.asarray(self._once("labels", lambda: smallest(self._all("y"))))

    def _all(self, name: str) -> np.ndarray:
        pieces = range(0, len(self), 2**20)
        return np.concatenate(
            [
                self.read_field(name, np.arange(start, min(len(self), start + 2**20)))
                for start in pieces
            ]
        )

    def read_together(self, ranks: ReadingRanks) -> None:
        """From now on, these ranks compute statistics together."""
        self._known["ranks"] = ranks

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        """Returns mean and deviation of a field over all or some samples, float64 (2, C) along the
        axis of its channels; takes one pass, and the result is kept.

        None without read_together(). Every rank calls it.
        """
        ranks: ReadingRanks | None = self._known.get("ranks")
        if ranks is None:
            return None
        shape = self.fields[name].shape
        chosen = "all" if indices is None else digest({"indices": indices})

        def read(rows: np.ndarray) -> np.ndarray:
            values = self.read_field(name, rows if indices is None else indices[rows])
            check_numbers(
                name,
                values,
                self.fields[name],
                self.where,
                rows if indices is None else indices[rows],
            )
            return values

        def compute() -> np.ndarray:
            return mean_and_std(
                read, len(self) if indices is None else len(indices), shape, ranks, channels
            )

        text = f"{name} {self.samples.key} {chosen} {self.identity()}"
        text += "" if channels == "last" else f" {channels}"
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if self.samples.key else ""
        return np.asarray(
            self._once(
                f"statistics {text}",
                lambda: kept(key, channel_count(shape, channels), ranks, compute),
            )
        )

    def known_grid(self, text: str) -> Grid | None:
        if self.file is None or len(self.samples.parts) != 1:
            return None
        name, words = name_and_words(text)
        if name.strip("/") not in {known.strip("/") for known in self.file.names}:
            return None
        grid = self.file.grid(name)
        return (
            None if grid is None else grid.cut(select(words, grid.shape, text, self.where).places)
        )

    def known_array(self, name: str) -> np.ndarray | None:
        """Raises UserError if the files have no such array."""
        return None if self.file is None else self.file.plane(name)

    def digests(self, seed: int) -> dict[str, str]:
        """Returns a digest of all labels and of samples at fixed positions."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        return {"arrays": str(self._once("digest", self._digest))}

    def _digest(self) -> str:
        values = sum(int(np.prod(kind.shape)) for kind in self.fields.values())
        rows = max(1, min(_DIGEST_ROWS, _DIGEST_VALUES // (_DIGEST_PLACES * max(1, values))))
        drawn = fold(_DRAWN, np.arange(_DIGEST_PLACES, dtype=np.uint64)) % np.uint64(len(self))
        places = (drawn.astype(np.int64)[:, None] + np.arange(rows)).ravel()
        indices = np.unique(np.minimum(places, len(self) - 1))
        found = {name: self.read_field(name, indices) for name in self.fields}
        labels = self.known_labels()
        return digest(found if labels is None else found | {"labels": labels})

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        with self._lock:
            if name not in self._known:
                self._known[name] = compute()
            return self._known[name]

    @property
    def rows_of_block(self) -> int | None:
        """Returns the largest number of neighbouring samples that are decoded together; None if
        each is read by itself."""
        most = max(
            (
                one.rows_of_block
                for part in self.samples.parts
                for arrays in part.arrays.values()
                for one in arrays
            ),
            default=1,
        )
        return most if most > 1 else None


def _unsorted(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    unsorted = np.empty_like(rows)
    unsorted[order] = rows
    return unsorted

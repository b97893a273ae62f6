"""StreamSource: a stream as the trainer reads it. Every rank reads all samples in order, and keeps
its share of each step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvdtrain.core.arrays import Batch, digest
from hvdtrain.data.field import Field
from hvdtrain.data.sampler import Positions
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.samples import (
    CollatedDataset,
    evaluation_seeds,
    random_state_kept,
    training_seeds,
)
from hvdtrain.errors import UserError
from hvdtrain.events.terminal import warn
from hvdtrain.extras.streams.buffer import BufferOrder
from hvdtrain.extras.streams.position import StreamPosition
from hvdtrain.extras.streams.reader import EVERY, Resuming, StreamPlace, StreamRead, StreamReader

_COMPARED = 64  # samples whose digests ranks compare, each EVERY samples after the one before
_KEPT_DIGESTS = 4096


@dataclass(frozen=True)
class StreamOrder:
    """The order of a stream, which StreamSource shuffles while it reads: position p of an epoch is
    `sample` p of the source."""

    buffer: int

    def positions(self, start: int, count: int, dataset: int, seed: int) -> Positions:
        places = np.arange(start, start + count, dtype=np.int64)
        return Positions(places % dataset, places // dataset)

    @property
    def facts(self) -> dict[str, str]:
        return {"shuffle_buffer": f"{self.buffer} (slots-1)"}

    def words(self, samples: int) -> str:
        if not self.buffer:
            return "in the order of the stream"
        return f"shuffled in a buffer of {self.buffer:,} samples"


class StreamedSamples(CollatedDataset):
    """Converts samples that were taken from a stream; errors name the stream's own code."""

    def _where(self) -> str:
        return str(self.dataset.where)


class TakenSamples:
    """The samples of a stream by their number, while they are converted."""

    def __init__(self, where: str, samples: int) -> None:
        self.where = where
        self.by_number: dict[int, Any] = {}
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> Any:
        return self.by_number[number]


class StreamSource(Source):
    """The samples of a stream. `sample` q of epoch e is what position q of that epoch takes from
    the buffer.

    read(), which may ask for any sample, returns samples of the head of the stream instead: they
    show what samples look like, for checks before training.
    """

    is_users_dataset = True
    reads_in_process = True  # in the order of the steps
    reads_any_sample = False

    def __init__(
        self,
        reader: StreamReader,
        samples: StreamedSamples,
        head: list[Any],
        buffer: int,
        notes: tuple[str, ...],
    ) -> None:
        self._reader = reader
        self._samples = samples
        self._taken: TakenSamples = samples.dataset
        self._head = head
        self._buffer = min(buffer, samples.samples)
        self._notes = notes
        self._order: BufferOrder | None = None  # once the seed is known
        self._slots: list[StreamRead] = []
        self._draws: Iterator[int] = iter(())
        self._position: int | None = None  # the next one, of the endless stream of the job
        self._next_read: StreamRead | None = None  # taken from the reader already
        self._digests: dict[int, str] = {}
        weakref.finalize(self, reader.close)

    @property
    def name(self) -> str:
        return self._samples.name

    @property
    def where(self) -> str:
        return self._samples.where

    @property
    def fields(self) -> Mapping[str, Field]:
        return {name: kind for name, kind in self._samples.fields.items() if name.isidentifier()}

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        return self._samples.nested_inputs

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    @property
    def order(self) -> StreamOrder:
        return StreamOrder(self._buffer)

    @property
    def hooks(self) -> tuple[StreamPosition, ...]:
        return (StreamPosition(self),)

    def __len__(self) -> int:
        return self._samples.samples

    def read(self, indices: np.ndarray) -> Batch:
        numbers = indices % len(self._head)
        return {name: array[numbers] for name, array in self._head_arrays.items()}

    @cached_property
    def _head_arrays(self) -> Batch:
        self._taken.by_number = dict(enumerate(self._head))
        with random_state_kept():
            return self._samples.read(np.arange(len(self._head)), None)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        """Takes the samples of these positions from the stream. Positions before those of the last
        call move the stream back, which takes time."""
        self._order = BufferOrder(self._buffer, len(self), seed)
        with random_state_kept():
            reads = [
                self._take(epoch * len(self) + index)
                for index, epoch in zip(indices.tolist(), epochs.tolist(), strict=True)
            ]
            self._taken.by_number = {read.number: read.sample for read in reads}
            numbers = np.array([read.number for read in reads], np.int64)
            return self._samples.read(numbers, training_seeds(numbers, 0 * numbers, seed))

    def digests(self, seed: int) -> dict[str, str]:
        return self.identity()

    def identity(self) -> dict[str, str]:
        return {"first samples": digest(self._head_arrays)}

    def digests_of_last_samples(self) -> dict[int, str]:
        """Returns number -> digest of some of the last samples that were read."""
        return dict(list(self._digests.items())[-_COMPARED:])

    def state(self) -> Any:
        """Returns what a checkpoint keeps: a place from which the stream can be read again up to
        the next position. None before the first sample."""
        if self._position is None:
            return None
        oldest = min((read.number for read in self._slots), default=self._position)
        place = self._reader.place_before(oldest)
        known = place is not None and place.number in self._digests
        return {
            "pass_samples": self._reader.pass_samples,
            "place": None if place is None else [*place],
            "digest": self._digests[place.number] if place is not None and known else "",
        }

    def resume_from(self, state: Any) -> None:
        """Continues from what state() returned, on any number of ranks."""
        self._position = None
        self._reader.pass_samples = state["pass_samples"]
        self._reader.places = ()
        self._digests = {}
        if state["place"] is not None:
            place = StreamPlace(*state["place"])
            self._reader.places = (place,)
            if state["digest"]:
                self._digests = {place.number: state["digest"]}

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._reader.close()

    def _take(self, position: int) -> StreamRead:
        """Returns the sample of a position. Samples of positions in between are dropped: other
        ranks have them."""
        if self._position is None or position < self._position:
            self._seek(position)
        assert self._position is not None
        while self._position < position:
            self._emit()
        return self._emit()

    def _emit(self) -> StreamRead:
        """Takes the sample of the next position."""
        assert self._order is not None and self._position is not None
        epoch, place = divmod(self._position, len(self))
        self._position += 1
        if not self._buffer:
            return self._next()
        if not place:
            self._slots = [self._next() for _ in range(self._buffer)]
            self._draws = self._order.slots_from(epoch, 0)
        slot = next(self._draws)
        found = self._slots[slot]
        if place + self._buffer < len(self):
            self._slots[slot] = self._next()
        else:
            self._slots[slot] = self._slots[-1]
            self._slots.pop()
        return found

    def _seek(self, position: int) -> None:
        """Moves to a position: the stream is read from the oldest sample in the buffer on."""
        assert self._order is not None
        epoch, place = divmod(position, len(self))
        self._position = position
        self._slots = []
        if not self._buffer or not place:
            self._start_at(position)
            return
        held = self._order.contents(epoch, place)
        slot_of = {sample: slot for slot, sample in enumerate(held)}
        self._slots = [StreamRead(0, None)] * len(held)
        first = epoch * len(self)
        self._start_at(first + min(held))
        for sample in range(min(held), min(place + self._buffer, len(self))):
            read = self._next()
            if sample in slot_of:
                self._slots[slot_of[sample]] = read
        self._draws = self._order.slots_from(epoch, place)

    def _start_at(self, number: int) -> None:
        """Moves the stream to a sample, by way of one whose digest is known. If that differs, the
        stream is moved in another way."""
        known = max((other for other in self._digests if other <= number), default=None)
        self._next_read = None
        self._reader.seek(number if known is None else known)
        if known is None:
            return
        while self._digest(read := self._reader.next()) != self._digests[known]:
            self._move_otherwise(known)
            self._reader.seek(known)
        while read.number < number:
            read = self._reader.next()
        self._next_read = read

    def _move_otherwise(self, number: int) -> None:
        """Gives up the way in which the stream was moved to this sample. Raises UserError if it was
        read from its beginning."""
        way = self._reader.resuming
        if not (way.by_state or way.by_skip):
            what = f"sample {number:,} of {self.name} is not the one of the checkpoint"
            fix = "the stream with which the job began, or a new run"
            raise UserError(what, self.where, fix)
        call = "load_state_dict()" if way.by_state else "skip()"
        warn(
            f"{self.name} does not continue with the same sample after {call}: it is moved to "
            f"sample {number:,} in another way"
        )
        self._reader.resuming = Resuming(by_state=False, by_skip=way.by_skip and way.by_state)

    def _next(self) -> StreamRead:
        read = self._next_read or self._reader.next()
        self._next_read = None
        if read.number % EVERY == 0 and read.number not in self._digests:
            self._digests[read.number] = self._digest(read)
            if len(self._digests) > _KEPT_DIGESTS:
                del self._digests[next(iter(self._digests))]
        return read

    def _digest(self, read: StreamRead) -> str:
        self._taken.by_number = {read.number: read.sample}
        seed = evaluation_seeds(np.array([read.number]))
        return digest(self._samples.sample(read.number, int(seed[0])))


def check_is_stream(is_stream: bool, name: str, where: str) -> None:
    """Raises UserError if data.epoch_samples is set for other data."""
    if not is_stream:
        what = f"data.epoch_samples is for streams, but {name} can be read in any order"
        raise UserError(what, where, "leave data.epoch_samples out")

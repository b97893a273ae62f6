"""Reads a stream in its order, ahead of training in a thread, and notes where it can resume."""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.own_line import own_line
from hvdtrain.core.progress import fold
from hvdtrain.data.user_data.samples import set_random_state
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.streams.origin import Opened, Origin

AHEAD = 256  # samples that the thread reads before they are needed
EVERY = 64  # samples between two places; also between two samples that ranks compare
MOST_PLACES = 256
_SAMPLES = 0x73747265616D  # a stream of counters


class StreamRead(NamedTuple):
    """A sample of the user's, and its number in the endless stream of all passes."""

    number: int
    sample: Any


class StreamPlace(NamedTuple):
    """A place of the endless stream."""

    number: int  # of the next sample
    pass_number: int
    sample: int  # of the next sample, in its pass
    state: Any  # of state_dict(), to continue there; None if the stream has none


class Resuming(NamedTuple):
    """How a stream is moved to a sample. Both false: it is read again up to there."""

    by_state: bool
    by_skip: bool


class StreamReader:
    """The endless stream: passes over the user's stream, one after the other.

    seed: for a stream that draws from shared random generators. They are seeded for each sample,
    and it is read by the thread that trains, when a sample is needed.
    """

    def __init__(
        self, origin: Origin, resuming: Resuming, least: int, seed: int | None = None
    ) -> None:
        self.origin = origin
        self.resuming = resuming
        self.places: tuple[StreamPlace, ...] = ()  # replaced as a whole: two threads use it
        self.pass_samples: int | None = None  # samples of a pass, once one has ended
        self.place_every = EVERY
        self._seed = seed
        self._least = least  # samples that the first pass must have
        self._samples: Iterator[StreamRead] = iter(())
        self._thread: _Thread | None = None

    def next(self) -> StreamRead:
        """Returns the next sample. Raises UserError for an error of the user's code."""
        return next(self._samples)

    def first_pass(self) -> Iterator[StreamRead]:
        """Yields the samples of the first pass, on this thread."""
        return self.rest_of_pass(self.origin.begin(0))

    def rest_of_pass(self, opened: Opened, sample: int = 0) -> Iterator[StreamRead]:
        """Yields the samples of an opened first pass from this one on, on this thread."""
        return self._pass(opened, 0, sample, sample)

    def seek(self, number: int) -> None:
        """Continues with this sample of the endless stream."""
        self.close()
        if self._thread is not None:  # it uses the stream, too
            self._thread.join()
            self._thread = None
        samples = self._from(number)
        if self._seed is not None:
            self._samples = samples
            return
        self._thread = _Thread(samples)
        self._samples = iter(self._thread)

    def close(self) -> None:
        """Ends the thread that reads ahead, after its current sample."""
        if self._thread is not None:
            self._thread.stop()

    def place_before(self, number: int) -> StreamPlace | None:
        """Returns the last known place at or before a sample."""
        return next((place for place in reversed(self.places) if place.number <= number), None)

    def _from(self, number: int) -> Iterator[StreamRead]:
        pass_number, sample = divmod(number, self.pass_samples or sys.maxsize)
        opened, sample = self._opened(number, pass_number, sample)
        for read in self._passes(opened, pass_number, sample):
            if read.number >= number:
                yield read

    def _opened(self, number: int, pass_number: int, sample: int) -> tuple[Opened, int]:
        """Returns the stream at or before a sample of a pass, and the sample at which it is."""
        place = self.place_before(number) if self.resuming.by_state else None
        if place is not None and place.pass_number == pass_number:
            if place.state is None:  # the place is the beginning of the pass
                return self.origin.begin(pass_number), 0
            return self.origin.restored(pass_number, place.state), place.sample
        if self.resuming.by_skip and sample:
            return self.origin.skipped(pass_number, sample), sample
        return self.origin.begin(pass_number), 0

    def _passes(self, opened: Opened, pass_number: int, sample: int) -> Iterator[StreamRead]:
        """Yields the samples from this one on, in all passes."""
        while True:
            number = pass_number * (self.pass_samples or 0) + sample
            for read in self._pass(opened, pass_number, sample, number):
                yield read
                sample += 1
            self._check_end(pass_number, sample)
            pass_number += 1
            sample = 0
            opened = self.origin.begin(pass_number)

    def _pass(
        self, opened: Opened, pass_number: int, sample: int, number: int
    ) -> Iterator[StreamRead]:
        """Yields the samples of the rest of a pass."""
        while True:
            if number % self.place_every == 0:
                self._note(opened, StreamPlace(number, pass_number, sample, None))
            if self._seed is not None:
                set_random_state(int(fold(self._seed, _SAMPLES, pass_number, sample)))
            try:
                found = next(opened.samples)
            except StopIteration:
                return
            except UserError:
                raise
            except Exception as error:
                what = f"sample {number:,} of {self.origin.name}"
                raise UserError(
                    f"{what}: {type(error).__name__}: {first_line(error)}",
                    own_line(error),
                    "correct it there",
                ) from error
            yield StreamRead(number, found)
            number += 1
            sample += 1

    def _note(self, opened: Opened, place: StreamPlace) -> None:
        if self.places and self.places[-1].number >= place.number:
            return  # read again
        kept = self.places
        if len(kept) == MOST_PLACES:  # the older half becomes sparse; the first one stays
            kept = (*kept[: MOST_PLACES // 2 : 2], *kept[MOST_PLACES // 2 :])
        # before the first sample, a state may be that of the pass before
        if self.resuming.by_state and opened.holder is not None and place.sample:
            place = place._replace(state=opened.holder.state_dict())
        self.places = (*kept, place)

    def _check_end(self, pass_number: int, samples: int) -> None:
        """Raises UserError if a pass has another number of samples than it should have."""
        name = self.origin.name
        if not samples:
            raise UserError(
                f"{name} has no samples", self.origin.where, "a stream with one sample or more"
            )
        if samples < self._least:
            what = (
                f"{name} ended after {samples:,} samples, before the first epoch of "
                f"data.epoch_samples={self._least} was complete"
            )
            fix = f"data.epoch_samples={samples}, or more data"
            raise UserError(what, self.origin.where, fix)
        if self.pass_samples not in (None, samples):
            what = (
                f"{name} ended after {samples:,} samples in pass {pass_number + 1}, but had "
                f"{self.pass_samples:,} in the first one"
            )
            raise UserError(what, self.origin.where, "the same number of samples in each pass")
        self.pass_samples = samples


class _Thread(threading.Thread):
    """Reads samples ahead of those that iterate over it."""

    def __init__(self, samples: Iterator[StreamRead]) -> None:
        super().__init__(name="hvdtrain-stream", daemon=True)
        self._samples = samples
        self._queue: queue.Queue[StreamRead | BaseException] = queue.Queue(AHEAD)
        self._is_over = False
        self.start()

    def run(self) -> None:
        try:
            for read in self._samples:
                if self._is_over:
                    return
                self._queue.put(read)
        except BaseException as error:  # raised again by the thread that takes the sample
            self._queue.put(error)

    def __iter__(self) -> Iterator[StreamRead]:
        while True:
            found = self._queue.get()
            if isinstance(found, BaseException):
                raise found
            yield found

    def stop(self) -> None:
        """Ends the thread after its current sample. It may be waiting for room in the queue."""
        self._is_over = True
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return


def shared_random_state() -> tuple[Any, ...]:
    """Returns the state of the random generators that all threads share, to compare it."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    torch = sys.modules.get("torch")
    of_torch = bytes(torch.default_generator.get_state().numpy()) if torch else b""
    return random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"], of_torch

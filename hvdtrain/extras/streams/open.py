"""Opens the user's data as a stream: tries how it can resume, and what its samples look like."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config.plugins import own_function
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import digest
from hvdtrain.data.source import NamedArrays, Source, Split
from hvdtrain.data.user_data.as_source import as_source, comes_in_order, parts_of
from hvdtrain.data.user_data.dataset import declared_classes
from hvdtrain.data.user_data.samples import (
    evaluation_seeds,
    probed,
    random_state_kept,
    set_random_state,
)
from hvdtrain.errors import UserError
from hvdtrain.extras.streams.keys import StreamKeys
from hvdtrain.extras.streams.origin import Origin, UserErrors, is_function, not_json
from hvdtrain.extras.streams.reader import (
    EVERY,
    Resuming,
    StreamRead,
    StreamReader,
    shared_random_state,
)
from hvdtrain.extras.streams.source import (
    StreamedSamples,
    StreamSource,
    TakenSamples,
    check_is_stream,
)

HEAD = 64  # samples that are read before training
TRIED = 4  # samples that are read twice, to compare them
MOST_VAL_SAMPLES = 2**20
NO_RESUMING = Resuming(False, False)


def open_stream(
    config: Config,
    found: Any,
    again: Callable[[], Any],
    split: Split,
    name: str,
    where: str,
    kept: tuple[str, ...],
) -> Source:
    """Opens the data of a job with data.epoch_samples. A validation stream is read completely.

    again: calls the user's function once more. Raises UserError for training data that are not a
    stream, and for a stream that cannot be read the same way twice.
    """
    stream, collate, loader = parts_of(found)
    if loader is not None and getattr(collate, "__module__", "").startswith("torch.utils.data."):
        collate = None
    function = own_function(config.data)
    is_stream = comes_in_order(stream) or is_function(stream)
    if split == "val":
        if is_stream:
            return _all_samples(stream, function, collate, name, where, kept)
        return as_source(found, name, where, None, kept)
    check_is_stream(is_stream, name, where)
    keys = StreamKeys.of(config)
    origin = Origin(stream, name, where, lambda: parts_of(again())[0])
    with random_state_kept():
        return _opened(origin, function, collate, keys, config.seed, kept, where)


def _opened(
    origin: Origin,
    function: Any,
    collate: Any,
    keys: StreamKeys,
    seed: int,
    kept: tuple[str, ...],
    where: str,
) -> StreamSource:
    assert keys.epoch_samples is not None
    head = _head(origin, keys.epoch_samples, seed)
    if not head.samples:
        raise UserError(f"{origin.name} has no samples", where, "a stream with one sample or more")
    taken = TakenSamples(origin.where, keys.epoch_samples)
    taken.by_number = dict(enumerate(head.samples))
    seeds = evaluation_seeds(np.arange(1))
    values = _values(origin.stream, function)
    first = probed(taken, collate, values, origin.name, int(seeds[0]), where, kept)
    samples = StreamedSamples(**vars(first))
    tried = _Tried(origin, samples, head, seed if head.draws else None)
    tried.check_repeats()
    resuming, why_not = tried.resuming()
    reader = StreamReader(origin, resuming, keys.epoch_samples, seed if head.draws else None)
    buffer = min(keys.shuffle_buffer, keys.epoch_samples)
    reader.place_every = EVERY * max(1, buffer // (8 * EVERY))
    notes = _notes(origin, head, resuming, why_not, buffer)
    return StreamSource(reader, samples, head.samples, buffer, notes)


def _values(stream: Any, function: Any) -> dict[str, int]:
    """Returns Field.values by field, as the attributes `classes` and `values` of the stream or of
    the user's function declare them."""
    classes = declared_classes(stream) or declared_classes(function)
    declared = getattr(stream, "values", None) or getattr(function, "values", None)
    others = declared if isinstance(declared, Mapping) else {}
    return {"y": classes, **others}


class _Head(NamedTuple):
    """The first samples of the stream."""

    samples: list[Any]
    draws: bool  # from random generators that all threads share
    per_s: float  # samples read in a second


def _head(origin: Origin, epoch_samples: int, seed: int) -> _Head:
    """Reads the first samples. They are seeded as in training, if that matters."""
    set_random_state(0)
    before = shared_random_state()
    reader = StreamReader(origin, NO_RESUMING, 1)
    few = [read.sample for read in islice(reader.first_pass(), TRIED)]
    draws = bool(few) and shared_random_state() != before
    began_s = time.perf_counter()
    reader = StreamReader(origin, NO_RESUMING, 1, seed if draws else None)
    samples = [read.sample for read in islice(reader.first_pass(), min(HEAD, epoch_samples))]
    return _Head(samples, draws, len(samples) / max(1e-9, time.perf_counter() - began_s))


class _Tried:
    """Tries on the first samples how a stream can be read again."""

    def __init__(
        self, origin: Origin, samples: StreamedSamples, head: _Head, seed: int | None
    ) -> None:
        self._origin = origin
        self._samples = samples
        self._head = head
        self._reader = StreamReader(origin, NO_RESUMING, 1, seed)
        self._after = len(head.samples) - 1  # a buffer that a state lacks may be right before

    def check_repeats(self) -> None:
        """Raises UserError if the stream gives other samples when it is read again."""
        for number, read in enumerate(islice(self._reader.first_pass(), TRIED)):
            if self._digest(read.sample) != self._digest(self._head.samples[number]):
                what = (
                    f"sample {number} of {self._origin.name} differs when the stream is read again"
                )
                fix = (
                    "the same samples in the same order each time: seed its generators when it "
                    "begins, and shuffle with data.shuffle_buffer"
                )
                raise UserError(what, self._origin.where, fix)

    def resuming(self) -> tuple[Resuming, str]:
        """Returns how the stream can be moved to a sample, and why its state_dict() is not used."""
        by_skip = self._origin.can_skip and self._continues(self._by_skip())
        found = self._by_state()
        if isinstance(found, str):
            return Resuming(False, by_skip), found
        return Resuming(found is not None, by_skip), ""

    def _by_state(self) -> str | bool | None:
        """Returns None for a stream without a state, true if its state can be used, else why
        not."""
        opened = self._origin.begin(0)
        if opened.holder is None:
            return None
        for _ in islice(self._reader.rest_of_pass(opened), self._after):
            pass
        state = opened.holder.state_dict()
        if part := not_json(state):
            return f"{part} is not JSON"
        restored = self._origin.restored(0, state)
        if self._continues(next(self._reader.rest_of_pass(restored, self._after), None)):
            return True
        return "load_state_dict() does not continue with the next sample"

    def _by_skip(self) -> StreamRead | None:
        skipped = self._origin.skipped(0, self._after)
        return next(self._reader.rest_of_pass(skipped, self._after), None)

    def _continues(self, read: StreamRead | None) -> bool:
        expected = self._head.samples[self._after]
        return read is not None and self._digest(read.sample) == self._digest(expected)

    def _digest(self, sample: Any) -> str:
        self._samples.dataset.by_number = {0: sample}
        seed = evaluation_seeds(np.arange(1))
        return digest(self._samples.sample(0, int(seed[0])))


def _notes(
    origin: Origin, head: _Head, resuming: Resuming, why_not: str, buffer: int
) -> tuple[str, ...]:
    rate = f"{head.per_s:,.0f}" if head.per_s >= 10 else f"{head.per_s:.2g}"
    lines = [
        f"{origin.name}: every rank reads the whole stream and keeps its share, about {rate} "
        "samples a second at the start"
    ]
    if resuming.by_state:
        how = f"a resume continues by load_state_dict() and reads up to {EVERY} samples again"
    elif resuming.by_skip:
        how = "a resume continues by skip()"
    else:
        how = "a resume reads the stream again up to its position, from the start of the pass"
    if why_not:
        how += f" ({why_not})"
    if buffer:
        again = round(buffer * (np.log(buffer) + 1))
        how += f"; for data.shuffle_buffer it reads about {again:,} more"
    lines.append(f"{origin.name}: {how}")
    lines.append(
        f"{origin.name}: what the data set tells a job at the start, such as means, is that of its "
        f"first {len(head.samples)} samples"
    )
    if head.draws:
        lines.append(
            f"{origin.name}: it draws from generators of random, NumPy or torch, which are seeded "
            "for each sample; it is read by the training thread, not ahead"
        )
    return tuple(lines)


def _all_samples(
    stream: Any, function: Any, collate: Any, name: str, where: str, kept: tuple[str, ...]
) -> NamedArrays:
    """Reads a validation stream to its end, into arrays."""
    with UserErrors(f"a sample of {name}", where):
        read = iter(stream() if is_function(stream) else stream)
        samples = list(islice(read, MOST_VAL_SAMPLES + 1))
    if len(samples) > MOST_VAL_SAMPLES:
        what = f"{name} has not ended after {MOST_VAL_SAMPLES:,} samples; it is kept in memory"
        raise UserError(what, where, "a finite stream, such as stream.take(5000); or a Dataset")
    source = as_source((samples, collate), name, where, None, kept)
    arrays = source.read(np.arange(len(samples)))
    return NamedArrays(arrays, _values(stream, function), where, nested_inputs=source.nested_inputs)

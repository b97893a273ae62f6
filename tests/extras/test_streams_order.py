"""data.epoch_samples: streams are read in their order, shuffled by the seed, and moved back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import stream_sources
from refusals import refusal_of_job
from stream_sources import sample

from hvdtrain.config.read import configure
from hvdtrain.errors import UserError
from hvdtrain.extras.streams import open as streams
from hvdtrain.extras.streams.buffer import BufferOrder
from hvdtrain.extras.streams.reader import AHEAD, EVERY, MOST_PLACES
from hvdtrain.extras.streams.source import StreamSource

SEED = 7
KINDS = ("generator", "skipping", "stateful", "hugging_face", "drawing")


def opened(
    given: Any, *, samples: int = 30, buffer: int = 0, again: Callable[[], Any] | None = None
) -> StreamSource:
    words = [f"data.epoch_samples={samples}", f"data.shuffle_buffer={buffer}", f"seed={SEED}"]
    config = configure(None, [*words, "data.name=stream_sources:generator"])
    source = streams.open_stream(
        config, given, again or (lambda: given), "train", "the stream", "data.name", ()
    )
    assert isinstance(source, StreamSource)
    return source


def of_kind(kind: str, *, samples: int = 30, buffer: int = 0, passes_of: int = 50) -> StreamSource:
    def again() -> Any:
        return getattr(stream_sources, kind)("train", passes_of)

    return opened(again(), samples=samples, buffer=buffer, again=again)


def taken(source: StreamSource, first: int, last: int) -> np.ndarray:
    """Reads positions [first, last) of the job."""
    positions = source.order.positions(first, last - first, len(source), SEED)
    found: np.ndarray = source.read_in_epochs(*positions, SEED)["x"]
    return found


def numbers(rows: np.ndarray, samples: int = 50) -> list[int]:
    """Returns which samples these are."""
    all_x = np.stack([sample(number)["x"] for number in range(samples)])
    return [int(np.flatnonzero((all_x == row).all(1))[0]) for row in rows]


def of_buffer(order: BufferOrder, epoch: int) -> tuple[list[int], list[list[int]]]:
    """A buffer of numbers, as a list: the samples in their order, and the contents before each."""
    stream = iter(range(order.epoch_samples))
    held = [next(stream) for _ in range(order.size)]
    taken: list[int] = []
    before: list[list[int]] = []
    for position in range(order.epoch_samples):
        before.append(list(held))
        (slot,) = order.slots(epoch, position, position + 1).tolist()
        taken.append(held[slot])
        following = next(stream, None)
        if following is None:
            held[slot] = held[-1]
            held.pop()
        else:
            held[slot] = following
    return taken, before


@pytest.mark.parametrize(("size", "samples"), [(1, 9), (5, 60), (16, 17), (12, 12)])
def test_the_contents_of_a_buffer_follow_from_the_position(size: int, samples: int) -> None:
    order = BufferOrder(size, samples, SEED)
    taken, before = of_buffer(order, 3)
    assert sorted(taken) == list(range(samples))
    assert (taken == list(range(samples))) == (size == 1)
    for position, held in enumerate(before):
        assert order.contents(3, position) == held
    assert taken != of_buffer(order, 4)[0] or size == 1


@pytest.mark.parametrize("buffer", [0, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_samples_of_the_stream(kind: str, buffer: int) -> None:
    """Epochs of 30 samples in passes of 50; then back, and forward over samples of other ranks."""
    source = of_kind(kind, buffer=buffer)
    rows = taken(source, 0, 120)
    order = BufferOrder(buffer, 30, SEED)
    expected = [
        (epoch * 30 + place) % 50
        for epoch in range(4)
        for place in (of_buffer(order, epoch)[0] if buffer else range(30))
    ]
    if kind != "drawing":
        # set_epoch() of Hugging Face shuffles shards in later passes
        sure = 30 if kind == "hugging_face" else 120
        assert numbers(rows)[:sure] == expected[:sure]
    for first, last in ((97, 110), (0, 1), (28, 33), (64, 70)):
        assert np.array_equal(taken(source, first, last), rows[first:last])
    source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumes_where_it_was(kind: str) -> None:
    """A state of a checkpoint on another rank, after the first pass and in a buffer."""
    source = of_kind(kind, samples=250, buffer=20, passes_of=300)
    rows = taken(source, 0, 700)
    assert of_kind(kind, samples=250).state() is None
    for position in (130, 262, 400, 680):
        taken(source, position - 3, position)
        resumed = of_kind(kind, samples=250, buffer=20, passes_of=300)
        resumed.resume_from(source.state())
        assert np.array_equal(taken(resumed, position + 1, position + 9), rows[position + 1 :][:8])
        resumed.close()
    source.close()


class Counting(stream_sources._Stateful):
    """Counts the samples that are read."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for found in super().__iter__():
            self.read += 1
            yield found


def test_a_state_saves_reading() -> None:
    source = opened(Counting("train", 100_000), samples=20_000)
    taken(source, 9_000, 9_002)
    stream = Counting("train", 100_000)
    resumed = opened(stream, samples=20_000)
    resumed.resume_from(source.state())
    before = stream.read
    taken(resumed, 9_002, 9_004)
    resumed.close()
    assert stream.read - before <= EVERY + AHEAD + 8
    assert len(source._reader.places) <= MOST_PLACES
    source.close()


def test_a_resume_that_does_not_continue_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    """After this state the stream leaves samples out, so it is read again."""
    source = of_kind("stateful", passes_of=1000, samples=900)
    rows = taken(source, 0, 310)
    state = source.state()
    state["place"][3]["next"] += 1
    resumed = of_kind("stateful", passes_of=1000, samples=900)
    resumed.resume_from(state)
    assert np.array_equal(taken(resumed, 300, 310), rows[300:])
    told = "does not continue with the same sample after load_state_dict()"
    assert told in capfd.readouterr().err
    source.close()
    resumed.close()


def test_a_stream_that_has_changed_is_an_error() -> None:
    def changed(after: int) -> Iterator[Any]:
        yield from (sample(number + 1000 * (number >= after)) for number in range(1000))

    source = opened(changed(999), samples=900, again=lambda: changed(999))
    taken(source, 0, 400)
    resumed = opened(changed(100), samples=900, again=lambda: changed(100))
    resumed.resume_from(source.state())
    with pytest.raises(UserError, match=r"sample 384 of the stream is not the one of the checkp"):
        taken(resumed, 400, 401)
    source.close()
    resumed.close()


class Unsafe(stream_sources._Stateful):
    """Its state is not JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "dice": np.arange(2)}


class Forgetful(stream_sources._Stateful):
    """Continues elsewhere, like a shuffle buffer that is filled again."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"] + 1 if state["next"] else 0


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (lambda: stream_sources.skipping("train"), "continues by skip()"),
        (lambda: stream_sources.stateful("train"), "continues by load_state_dict() and"),
        (
            lambda: Unsafe("train", 50),
            "from the start of the pass (state_dict()['dice'], a ndarray",
        ),
        (
            lambda: Forgetful("train", 50),
            "load_state_dict() does not continue with the next sample",
        ),
        (lambda: stream_sources.drawing("train"), "it is read by the training thread, not ahead"),
        (
            lambda: stream_sources.hugging_face("train").shuffle(seed=1, buffer_size=9),
            "continues by skip() (load_state_dict() does not continue",
        ),
    ],
)
def test_how_a_stream_resumes_is_tried(given: Callable[[], Any], note: str) -> None:
    notes = opened(given(), buffer=8).notes
    assert any(note in line for line in notes), notes
    assert "every rank reads the whole stream and keeps its share" in notes[0]


def endless(split: str = "train") -> Iterator[Any]:
    number = 0
    while True:
        if number == 100:
            raise ValueError("a damaged file")
        yield sample(number, split)
        number += 1


def changing() -> Iterator[Any]:
    changing.calls += 1  # type: ignore[attr-defined]
    yield from (sample(number + changing.calls) for number in range(9))  # type: ignore[attr-defined]


changing.calls = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2, 3], r"data.epoch_samples is for streams, but the stream can be read in any order"),
        (lambda: iter(()), r"the stream has no samples"),
        (changing, r"sample 0 of the stream differs when the stream is read again\n.*changing"),
        (
            lambda: stream_sources.generator("train", 20),
            r"the stream ended after 20 samples, before the first epoch of data.epoch_samples=110 "
            r"was complete\n.*\n  fix: data.epoch_samples=20",
        ),
        (
            endless,
            r"sample 100 of the stream: ValueError: a damaged file\n  where: .*_order.py:\d+",
        ),
        (
            (sample(number) for number in range(9)),
            r"is a generator, which can be read only once\n.*\n  fix: give the generator function",
        ),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        taken(opened(given, samples=110), 0, 110)


def test_a_pass_of_another_length_is_an_error() -> None:
    lengths = iter([60] * 6 + [50] * 9)

    def uneven() -> Iterator[Any]:
        return stream_sources.generator("train", next(lengths))

    with pytest.raises(UserError, match=r"ended after 50 samples in pass \d, but had 60"):
        taken(opened(uneven, samples=30), 0, 500)


def test_a_validation_stream_is_read_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(None, ["data.epoch_samples=9", "data.name=stream_sources:generator"])

    def val(given: Any) -> Any:
        return streams.open_stream(config, given, lambda: given, "val", "the set", "data.name", ())

    found = val(stream_sources.generator("val"))
    assert np.array_equal(found.read(np.arange(20))["x"][3], sample(3, "val")["x"])
    monkeypatch.setattr(streams, "MOST_VAL_SAMPLES", 70)
    with pytest.raises(UserError, match="the set has not ended after 70 samples"):
        val(endless)
    assert len(val([(sample(1)["x"], 0)] * 3)) == 3  # a set that can be read in any order


def test_the_thread_ends_with_the_source() -> None:
    before = threading.active_count()
    source = of_kind("generator", samples=900, passes_of=1000)
    taken(source, 0, 2)
    thread = source._reader._thread
    assert thread is not None and threading.active_count() == before + 1
    del source
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data.shuffle_buffer=8", "data.shuffle_buffer=8"),
        ("data.epoch_samples=9", "data.name=digits can be read in any order"),
    ],
)
def test_keys_that_mean_nothing_are_refused(words: str, expected: str) -> None:
    assert expected in " ".join(refusal_of_job(words, "mpi", 2))

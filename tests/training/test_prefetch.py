"""The prefetcher: the same steps in the same order however far it reads ahead, errors in their
step, no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from ranks import implemented, needs_extra
from waiting import wait_until

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch, digests
from hvdtrain.core.progress import Progress
from hvdtrain.data.datasets.text import Windows
from hvdtrain.data.field import Field
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.data.subset import subset
from hvdtrain.errors import UserError
from hvdtrain.training.build import build_learner, build_recipe, build_task
from hvdtrain.training.datasets import build_source
from hvdtrain.training.health.stall_report import frames_of_work
from hvdtrain.training.input import (
    DEFAULT_STEPS_AHEAD,
    Prefetcher,
    ReadAhead,
    choose_read_ahead,
    read_ahead_of,
)

WORDS = [
    "data.name=synthetic",
    "data.samples=50",
    "data.shape=[6,6,2]",
    "model.name=mlp",
    "batch.size=8",
    "epochs=2",
    "speed.device=cpu",
]
TIMEOUT_S = 300  # of every wait: reached only where a test fails
FIRST = Progress(50, 100)  # 2 epochs of 50 samples, 13 steps


class RecordingSource(Source):
    """A source that is not an array. It records each read and its thread, and calls
    before_read(samples) first."""

    def __init__(self, source: Any, before_read: Callable[[np.ndarray], Any] | None = None) -> None:
        self.source = source
        self.shape = source.shape
        self.classes = source.classes
        self.before_read = before_read or (lambda samples: None)
        self.reads: list[list[int]] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def fields(self) -> Mapping[str, Field]:
        fields: Mapping[str, Field] = self.source.fields
        return fields

    def digests(self, seed: int) -> dict[str, str]:
        return {}

    def identity(self) -> dict[str, str]:
        return {}

    def read(self, samples: np.ndarray) -> Batch:
        self.reads.append(samples.tolist())
        self.threads.add(threading.current_thread().name)
        self.before_read(samples)
        return self.source.read(samples)

    def stats(self) -> Any:
        return self.source.stats()


def make(
    *words: str,
    before_read: Callable[[np.ndarray], Any] | None = None,
    of_many_ranks: tuple[str, ...] = (),
) -> tuple[Prefetcher, Any]:
    """of_many_ranks: words of the prefetcher's configuration that a learner of one process does not
    take."""
    config = configure(None, [*WORDS, *words])
    images = build_source(config, "train")
    source: Any = ArraySource(*images.read(np.arange(50)).values(), images.classes)
    learner = build_learner(config, build_task(source, source, config), SingleProcessCommunicator())
    if not config.data.resident:
        source = RecordingSource(source, before_read)
    config = configure(None, [*WORDS, *words, *of_many_ranks])
    return Prefetcher(
        config,
        SingleProcessCommunicator(),
        build_recipe(config, len(source), None),
        source,
        learner,
    ), source


def take_steps(prefetcher: Prefetcher, steps: int) -> list[dict[str, int]]:
    """Digests of every array of each step; closes the prefetcher."""
    progress = FIRST
    found = []
    for _ in range(steps):
        hyper, micro_batches = prefetcher.take(progress)
        assert hyper.step == progress.step
        tensors = {
            f"{i}.{name}": value
            for i, batch in enumerate(micro_batches)
            for name, value in batch.arrays.items()
        }
        arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
        found.append(digests(arrays.items()))
        progress = progress.advance(hyper.batch)
    prefetcher.close()
    return found


AUGMENTED = implemented(
    "augment.crop=1 augment.flip=true augment.cutout=2 augment.mixup=0.3 augment.cutmix=1.0 "
    "augment.erase=0.5 augment.color_jitter=[0.4] "
    "batch.micro=3 recipe.sample_noise=0.5 optim.base_batch=4"
)


@pytest.mark.parametrize("words", ["", AUGMENTED])
@pytest.mark.parametrize(
    "how",
    [
        "data.ahead=1",
        "data.ahead=3 data.readers=1",
        "data.ahead=4 data.readers=3",
        "data.resident=true",
    ],
)
def test_reading_ahead_changes_no_number(how: str, words: str) -> None:
    plain = take_steps(make("data.ahead=0", *words.split())[0], 12)
    assert take_steps(make(*how.split(), *words.split())[0], 12) == plain
    assert len({str(step) for step in plain}) == 12


def test_two_readers_read_three_steps_ahead_at_the_same_time_and_end() -> None:
    threads_before = threading.active_count()
    both_readers = threading.Barrier(2)  # breaks after TIMEOUT_S where a read waits alone
    prefetcher, source = make(
        "data.ahead=3", "data.readers=2", before_read=lambda _: both_readers.wait(TIMEOUT_S)
    )
    prefetcher.take(FIRST)
    prefetcher.drain()
    assert len(source.reads) == 4 and not both_readers.broken
    assert len(source.threads) == 2 and all(
        name.startswith("hvdtrain-reader") for name in source.threads
    )
    prefetcher.close()
    assert threading.active_count() == threads_before


def test_nothing_is_read_beyond_the_end() -> None:
    for words, steps in (([], 13), (["max_steps=4"], 4)):
        prefetcher, source = make("data.ahead=6", *words)
        take_steps(prefetcher, steps)
        assert len(source.reads) == steps


def test_an_error_of_a_reader_is_raised_by_its_own_step() -> None:
    plain, recorded = make("data.ahead=0")
    take_steps(plain, 4)
    broken = recorded.reads[2][0]

    def fail(samples: np.ndarray) -> None:
        if broken in samples:
            raise UserError(f"sample {broken} is broken", "here")

    prefetcher, _ = make("data.ahead=3", before_read=fail)
    progress = FIRST
    for _ in range(2):
        progress = progress.advance(prefetcher.take(progress).hyper.batch)
    with pytest.raises(UserError, match=f"sample {broken} is broken"):
        prefetcher.take(progress)
    prefetcher.close()


def test_a_stall_report_shows_the_reader_that_hangs() -> None:
    reading = threading.Event()
    release = threading.Event()

    def hang(samples: np.ndarray) -> None:
        reading.set()
        release.wait(TIMEOUT_S)

    prefetcher, _ = make("data.ahead=2", before_read=hang)
    taker = threading.Thread(target=prefetcher.take, args=(FIRST,))
    taker.start()
    assert reading.wait(TIMEOUT_S)
    names: list[str] = []

    def is_seen() -> bool:
        names[:] = [frame.f_code.co_name for frame in frames_of_work(taker.ident or 0)]
        return "hang" in names

    wait_until(is_seen, "the reader may hang before the taker waits for it")
    release.set()
    taker.join()
    prefetcher.close()
    assert "hang" in names and "prepare" in names and "take" not in names


def test_a_step_that_was_not_expected_is_read_anew() -> None:
    prefetcher, _ = make("data.ahead=3")
    plain, _ = make("data.ahead=0")
    for progress in (FIRST, Progress(50, 100, 7, 56), Progress(50, 100, 2, 16)):
        ahead = prefetcher.take(progress).micro_batches[0].arrays["x"]
        now = plain.take(progress).micro_batches[0].arrays["x"]
        assert np.array_equal(ahead.numpy(), now.numpy())
    prefetcher.close()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_evaluation_reads_ahead_and_in_order(ahead: int) -> None:
    prefetcher, source = make(f"data.ahead={ahead}")
    batches = [np.arange(0, 20), np.arange(20, 40), np.arange(40, 40), np.arange(40, 50)]
    labels = [
        None if batch is None else batch.arrays["y"].tolist()
        for batch in prefetcher.evaluation(source, batches)
    ]
    y = source.source.read(np.arange(50))["y"].tolist()
    assert labels == [y[:20], y[20:40], None, y[40:]]
    prefetcher.close()


def test_steps_ahead_and_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """(steps, readers) where reading is slow and where it is fast; 6 cores, 2 ranks on the host."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    cases = {
        "": ((3, 3), (0, 1)), "data.readers=5": ((5, 5), (5, 5)), "data.ahead=0": ((0, 1), (0, 1)), "data.ahead=1": ((1, 1), (1, 1)),  # noqa: E501
        "data.ahead=4 data.readers=2": ((4, 2), (4, 2)),
    }  # fmt: skip
    for words, (slow, fast) in cases.items():
        config = configure(None, words.split()).data
        assert (choose_read_ahead(config, False, 2), choose_read_ahead(config, True, 2)) == (
            slow,
            fast,
        ), words
    assert choose_read_ahead(configure(None, []).data, False, 6) == ReadAhead(
        DEFAULT_STEPS_AHEAD, 1
    )


def test_a_source_that_is_no_array_cannot_stay_on_the_device() -> None:
    config = configure(None, [*WORDS, "data.resident=true"])
    source = ArraySource(np.zeros((9, 6, 6, 2), np.uint8), np.zeros(9, np.int64), 1)
    learner = build_learner(config, build_task(source, source, config), SingleProcessCommunicator())
    with pytest.raises(UserError, match=r"data\.resident"):
        Prefetcher(
            config,
            SingleProcessCommunicator(),
            build_recipe(config, 9, None),
            RecordingSource(source),
            learner,
        )


@needs_extra("servers")
def test_a_worker_whose_next_ticket_is_not_known_reads_no_other_step() -> None:
    """Asynchronous parameter servers give a worker any step: what is read ahead would be for
    nothing, and the step would wait for it."""
    prefetcher, source = make("data.ahead=3", of_many_ranks=("servers.count=1", "servers.bound=4"))
    for step in (0, 2, 5):
        prefetcher.take(Progress(50, 100, step, 8 * step))
    prefetcher.drain()
    plain, recorded = make("data.ahead=0")
    take_steps(plain, 6)
    assert source.reads == [recorded.reads[step] for step in (0, 2, 5)]
    assert prefetcher.summary == "read when needed"
    prefetcher.close()


def test_tokens_in_memory_are_read_at_once_and_a_part_of_them_too() -> None:
    tokens = Windows(np.arange(65, dtype=np.uint8), 16, 256)
    for source in (tokens, subset(tokens, np.arange(2))):
        assert read_ahead_of(configure(None, []).data, source, 1) == ReadAhead(0, 1)

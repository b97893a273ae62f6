"""Samples that are known in advance: the numbers are those of the file whatever was told, and
blocks are decoded a fraction as often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Progress
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.sampler import positions_of_rank
from hvdtrain.data.source import ArraySource, Foresight, LabelledImages, NamedArrays, Source
from hvdtrain.training.build import build_learner, build_recipe, build_task
from hvdtrain.training.input import Prefetcher

SAMPLES = 3000
BATCH = 20
X = np.random.default_rng(1).normal(size=(SAMPLES, 4, 40)).astype("f4")  # 1.9 MB, twice the cache


class Listening(AroundSource):
    """A source that wants to know its samples in advance."""

    foresight = Foresight(500, 4, 40)

    def __init__(self, source: Source) -> None:
        self.source = source
        self.told = [np.empty(0, np.int64)]
        self.reads = list[np.ndarray]()

    def read(self, indices: np.ndarray) -> Batch:
        self.reads.append(indices)
        return self.source.read(indices)

    def expect(self, indices: np.ndarray, anew: bool) -> None:
        self.told = [indices] if anew else [*self.told, indices]


class ListeningImages(Listening, LabelledImages):
    """Images that want to be known in advance."""

    source: ArraySource
    shape = property(lambda self: self.source.shape)
    classes = property(lambda self: self.source.classes)
    class_names = property(lambda self: self.source.class_names)

    def labels(self) -> np.ndarray:
        return self.source.labels()


@pytest.mark.parametrize(
    "words",
    [
        ["data.ahead=0"],
        ["data.ahead=3", "data.readers=1"],
        ["data.ahead=2", "data.readers=1", "batch.micro=5"],
    ],
)
def test_a_prefetcher_tells_what_it_reads(words: list[str]) -> None:
    arrays = NamedArrays({"x": X[:500], "y": X[:500, 0, :3].copy()})
    config = configure(
        None,
        [
            "task.name=regression",
            "model.name=mlp",
            "batch.size=13",
            "speed.device=cpu",
            "epochs=2",
            *words,
        ],
    )
    source = Listening(arrays)
    learner = build_learner(config, build_task(arrays, arrays, config), SingleProcessCommunicator())
    prefetcher = Prefetcher(
        config, SingleProcessCommunicator(), build_recipe(config, 500, None), source, learner
    )
    for start in (0, 490):  # from the beginning, and as a job that is resumed
        progress = Progress(500, 1000, 0, start)
        source.reads = []
        for _ in range(30):
            prefetcher.take(progress)
            progress = progress.advance(13)
        prefetcher.drain()
        told = np.concatenate(source.told).tolist()
        read = np.concatenate(source.reads).tolist()
        assert (
            told[: len(read)]
            == read
            == positions_of_rank(start, len(read), 0, 1, 500, config.seed).samples.tolist()
        )
        assert (
            source.foresight.ahead - 13 < len(told) - len(read) <= source.foresight.ahead
            or len(told) == -(-(1000 - start) // 13) * 13
        )
    prefetcher.close()


def test_partners_of_a_mixture_are_told_too() -> None:
    pixels = np.random.default_rng(2).integers(0, 255, (500, 8, 8, 3)).astype("u1")
    arrays = ArraySource(pixels, np.arange(500) % 3, 3)
    config = configure(
        None,
        [
            "model.name=mlp",
            "batch.size=13",
            "speed.device=cpu",
            "augment.mixup=0.3",
            "data.ahead=0",
        ],
    )
    source: Any = ListeningImages(arrays)
    learner = build_learner(config, build_task(arrays, arrays, config), SingleProcessCommunicator())
    prefetcher = Prefetcher(
        config, SingleProcessCommunicator(), build_recipe(config, 500, None), source, learner
    )
    for step in range(5):
        prefetcher.take(Progress(500, 5000, step, 13 * step))
    told = np.concatenate(source.told).tolist()
    read = np.concatenate(source.reads).tolist()
    assert len(read) == 5 * 26 and told[: len(read)] == read
    assert sorted(set(read)) != sorted(
        set(positions_of_rank(0, 65, 0, 1, 500, config.seed).samples.tolist())
    )


@pytest.mark.parametrize(("window", "is_told"), [(2, False), (30, True)])
def test_windows_of_blocks_that_fit_into_memory_are_not_told(window: int, is_told: bool) -> None:
    arrays = NamedArrays({"x": X[:500], "y": X[:500, 0, :3].copy()})
    words = [
        "data.shuffle=blocks",
        "data.shuffle_block=4",
        f"data.shuffle_window={window}",
        "task.name=regression",
        "data.ahead=0",
    ]
    config = configure(None, [*words, "model.name=mlp", "batch.size=13", "speed.device=cpu"])
    source = Listening(arrays)
    learner = build_learner(config, build_task(arrays, arrays, config), SingleProcessCommunicator())
    Prefetcher(
        config, SingleProcessCommunicator(), build_recipe(config, 500, None), source, learner
    ).take(Progress(500, 1000))
    assert (len(source.told) > 1) == is_told

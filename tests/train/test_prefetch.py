"""The feed: the same steps in the same order whatever it does ahead, errors where they are needed, no thread left, a set on the device."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.core.digest import digests
from hvdtrain.core.progress import Progress
from hvdtrain.data.source import ArraySource
from hvdtrain.errors import UserError
from hvdtrain.train.build import build_learner, build_recipe, build_source, build_task
from hvdtrain.train.health.stall_report import frames_of_work
from hvdtrain.train.input.prefetch import AHEAD, Prefetcher, plan

WORDS = ["data.name=synthetic", "data.samples=50", "data.shape=[6,6,2]", "model.name=mlp", "batch.size=8", "epochs=2", "speed.device=cpu"]


class Slow:
    """A source that is no array: it takes a while, remembers who read what, and fails at a sample."""

    def __init__(self, source: Any, bad: int = -1) -> None:
        self.source, self.bad, self.shape, self.classes = source, bad, source.shape, source.classes
        self.read_rows: list[list[int]] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: np.ndarray) -> Batch:
        self.read_rows.append(rows.tolist())
        self.threads.add(threading.current_thread().name)
        time.sleep(0.002)
        if self.bad in rows:
            raise UserError(f"sample {self.bad} is broken", "here")
        return self.source.read(rows)

    def stats(self) -> Any:
        return self.source.stats()


def prefetcher(*words: str, bad: int = -1) -> tuple[Prefetcher, Slow, Any]:
    config, provenance = configure(None, [*WORDS, *words])
    images = build_source(config, provenance, "train")
    source = ArraySource(*images.read(np.arange(50)).values(), images.classes)
    learner = build_learner(config, provenance, build_task(source, source, provenance), SingleProcessCommunicator())
    wrapped: Any = source if config.data.resident else Slow(source, bad)
    return (
        Prefetcher(config, SingleProcessCommunicator(), build_recipe(config, provenance, len(source)), wrapped, learner),
        wrapped,
        learner,
    )


def walk(one: Prefetcher, steps: int) -> list[dict[str, int]]:
    """What each step is given."""
    p, found = Progress(50, 100), []
    for _ in range(steps):
        hyper, micro = one.take(p)
        assert hyper.step == p.step
        arrays = {f"{i}.{name}": t.contiguous().numpy() for i, batch in enumerate(micro) for name, t in batch.items()}
        found.append(digests(arrays.items()))
        p = p.advance(hyper.batch)
    one.close()
    return found


MORE = "augment.crop=1 augment.flip=true augment.cutout=2 augment.mixup=0.3 batch.micro=3 recipe.sample_noise=0.5 optim.base_batch=4"


@pytest.mark.parametrize("words", ["", MORE])
@pytest.mark.parametrize("how", ["data.ahead=1", "data.ahead=3 data.readers=1", "data.ahead=4 data.readers=3", "data.resident=true"])
def test_every_way_gives_the_same_numbers(how: str, words: str) -> None:
    plain = walk(prefetcher("data.ahead=0", *words.split())[0], 12)
    assert walk(prefetcher(*how.split(), *words.split())[0], 12) == plain
    assert len({str(step) for step in plain}) == 12


def test_readers_read_ahead_in_their_own_threads_and_end() -> None:
    before = threading.active_count()
    one, source, _ = prefetcher("data.ahead=3", "data.readers=2")
    one.take(Progress(50, 100))
    time.sleep(0.1)
    assert len(source.read_rows) == 4 and all(name.startswith("hvdtrain-reader") for name in source.threads)
    one.close()
    assert threading.active_count() == before


def test_nothing_is_read_beyond_the_end() -> None:
    for words, steps in (([], 13), (["max_steps=4"], 4)):
        one, source, _ = prefetcher("data.ahead=6", *words)
        walk(one, steps)
        assert len(source.read_rows) == steps


def test_what_a_reader_raises_comes_with_its_step_alone() -> None:
    rows = prefetcher("data.ahead=0")[1]
    one, source, _ = prefetcher("data.ahead=0")
    walk(one, 4)
    bad = source.read_rows[2][0]
    del rows
    one, _, _ = prefetcher("data.ahead=3", bad=bad)
    p = Progress(50, 100)
    for _ in range(2):
        p = p.advance(one.take(p)[0].batch)
    with pytest.raises(UserError, match=f"sample {bad} is broken"):
        one.take(p)
    one.close()


def test_a_report_of_no_progress_shows_the_reader_that_hangs() -> None:
    one, source, _ = prefetcher("data.ahead=2")
    go = threading.Event()
    source.read = lambda rows: (go.wait(10), source.source.read(rows))[1]
    waiting = threading.Thread(target=one.take, args=(Progress(50, 100),))
    waiting.start()
    time.sleep(0.1)
    shown = [framework.f_code.co_name for framework in frames_of_work(waiting.ident or 0)]
    go.set()
    waiting.join()
    one.close()
    assert "<lambda>" in shown and "prepare" in shown and "take" not in shown


def test_a_step_that_nobody_foresaw() -> None:
    one, _, _ = prefetcher("data.ahead=3")
    plain, _, _ = prefetcher("data.ahead=0")
    for p in (Progress(50, 100), Progress(50, 100, 7, 56), Progress(50, 100, 2, 16)):
        there, here = one.take(p)[1][0]["x"], plain.take(p)[1][0]["x"]
        assert np.array_equal(there.numpy(), here.numpy())
    one.close()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_evaluation_reads_ahead_and_in_order(ahead: int) -> None:
    one, source, _ = prefetcher(f"data.ahead={ahead}")
    parts = [np.arange(0, 20), np.arange(20, 40), np.arange(40, 40), np.arange(40, 50)]
    labels = [None if batch is None else batch["y"].tolist() for batch in one.evaluation(source, parts)]
    y = source.source.read(np.arange(50))["y"].tolist()
    assert labels == [y[:20], y[20:40], None, y[40:]]
    one.close()


def test_how_far_ahead_and_by_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """(steps, threads); 6 cores, 2 ranks on the host."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    cases = {
        "": ((3, 3), (0, 1)), "data.readers=5": ((5, 5), (5, 5)), "data.ahead=0": ((0, 1), (0, 1)), "data.ahead=1": ((1, 1), (1, 1)),
        "data.ahead=4 data.readers=2": ((4, 2), (4, 2)),
    }  # fmt: skip
    for words, (elsewhere, at_hand) in cases.items():
        config = configure(None, words.split())[0]
        assert (plan(config, False, 2), plan(config, True, 2)) == (elsewhere, at_hand), words
    assert plan(configure(None, [])[0], False, 6) == (AHEAD, 1)
    with pytest.raises(UserError, match="nothing to do"):
        plan(configure(None, ["data.ahead=0", "data.readers=2"])[0], False)


def test_a_set_that_is_no_array_cannot_stay_on_the_device() -> None:
    config, provenance = configure(None, [*WORDS, "data.resident=true"])
    source = ArraySource(np.zeros((9, 6, 6, 2), np.uint8), np.zeros(9, np.int64), 1)
    learner = build_learner(config, provenance, build_task(source, source, provenance), SingleProcessCommunicator())
    with pytest.raises(UserError, match=r"data\.resident"):
        Prefetcher(config, SingleProcessCommunicator(), build_recipe(config, provenance, 9), Slow(source), learner)

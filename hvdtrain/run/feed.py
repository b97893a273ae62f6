"""The samples of each step, made ready on other threads while steps before it are trained on."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.frames.learner import Learner
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.run.micro import read, rows_of_step
from hvdtrain.state import Batch, Hyper, Progress

AHEAD = 2  # steps
MOST_READERS = 8


class Feed:
    """take(p) gives the step that follows p. The steps after it are known too, since they depend on progress alone."""

    def __init__(self, config: Config, engine: Engine, recipe: Recipe, source: Source, learner: Learner) -> None:
        self._config, self._engine, self._recipe, self._source, self._learner = config, engine, recipe, source, learner
        self.held, self.samples = learner.hold(source), len(source)
        self.ahead, self.readers = plan(config, self.held or in_memory(source))
        self.waited_s = 0.0  # for samples, so far
        self._pool = ThreadPoolExecutor(self.readers, "hvdtrain-reader") if self.ahead else None
        self._queue: deque[tuple[Progress, Future[tuple[Hyper, list[Batch]]]]] = deque()

    def take(self, p: Progress) -> tuple[Hyper, list[Batch]]:
        """The numbers of the step, and this rank's micro-batches on the device. What a reader raised is raised here."""
        began = time.perf_counter()
        try:
            if self._pool is None:
                return self._prepare(p)
            if not self._queue or self._queue[0][0] != p:  # the first step, or one that nobody foresaw
                self._drop()
                self._submit(p)
            _, future = self._queue.popleft()
            self._look_ahead(p)
            return future.result()
        finally:
            self.waited_s += time.perf_counter() - began

    def evaluation(self, source: Source, parts: list[np.ndarray]) -> Iterator[Batch | None]:
        """The rows of each part, one after the other, on the device; None for a part of no rows."""

        def prepare(rows: np.ndarray) -> Batch | None:
            return self._learner.put(source.read(rows)) if len(rows) else None

        if self._pool is None or in_memory(source):
            yield from map(prepare, parts)
            return
        under_way: deque[Future[Batch | None]] = deque()
        for place in range(len(parts)):
            for rows in parts[place + len(under_way) : place + 1 + self.ahead]:
                under_way.append(self._pool.submit(prepare, rows))
            yield under_way.popleft().result()

    def close(self) -> None:
        """Leaves no thread behind; what was made ready is dropped."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def words(self) -> str:
        """For the line that tells the user."""
        if self.held:
            return "on the device"
        return f"{self.readers} reader{'s' * (self.readers > 1)}, {self.ahead} steps ahead" if self.ahead else "read when needed"

    def _look_ahead(self, p: Progress) -> None:
        """Keeps `ahead` steps after that of p under way, but none that this job does not make."""
        last = self._queue[-1][0] if self._queue else p
        while len(self._queue) < self.ahead:
            last = last.advance(self._recipe.at(last).batch)
            if last.done or last.step == self._config.max_steps:
                return
            self._submit(last)

    def _submit(self, p: Progress) -> None:
        assert self._pool is not None
        self._queue.append((p, self._pool.submit(self._prepare, p)))

    def _prepare(self, p: Progress) -> tuple[Hyper, list[Batch]]:
        hyper = self._recipe.at(p)
        parts = rows_of_step(self._config, p, hyper, self._recipe.batch.first, self._engine)
        return hyper, [self._learner.put(read(self._source, part, hyper, self._config, self.held)) for part in parts]

    def _drop(self) -> None:
        while self._queue:
            self._queue.popleft()[1].cancel()


@contextmanager
def feeding(config: Config, engine: Engine, recipe: Recipe, source: Source, learner: Learner) -> Iterator[Feed]:
    """A feed, and none of its threads afterwards."""
    feed = Feed(config, engine, recipe, source, learner)
    try:
        yield feed
    finally:
        feed.close()


def in_memory(source: Source) -> bool:
    """Whether reading is copying from memory."""
    return isinstance(source, ArraySource)


def plan(config: Config, at_hand: bool) -> tuple[int, int]:
    """(steps ahead, threads) of data.ahead and data.readers; by default none for samples that are at hand already."""
    ahead = config.data.ahead if config.data.ahead is not None else 0 if at_hand else AHEAD
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ahead, config.data.readers or max(1, min(cores, ahead, MOST_READERS))

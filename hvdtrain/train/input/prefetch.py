"""The samples of each step, made ready on other threads while steps before it are trained on."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.recipe import Recipe
from hvdtrain.train.input.micro_batches import read, rows_of_step

AHEAD = 2  # steps
MOST_READERS = 8


class Prefetcher:
    """take(p) gives the step that follows p. The steps after it are known too, since they depend on progress alone."""

    def __init__(self, config: Config, communicator: Communicator, recipe: Recipe, source: Source, learner: Learner) -> None:
        self._config, self._engine, self._recipe, self._source, self._learner = config, communicator, recipe, source, learner
        self.held, self.samples = learner.cache_on_device(source), len(source)
        self.ahead, self.readers = plan(config, self.held or in_memory(source), communicator.local_size)
        self.waited_s = 0.0  # for samples, so far
        self._pool = ThreadPoolExecutor(self.readers, "hvdtrain-reader") if self.ahead else None
        self._queue: deque[tuple[Progress, Future[tuple[Hyper, list[Batch]]]]] = deque()

    def take(self, p: Progress) -> tuple[Hyper, list[Batch]]:
        """The numbers of the step, and this rank's micro-batches on the device. What a reader raised is raised here."""
        began = time.perf_counter()
        try:
            if self._pool is None:
                return self.prepare(p)
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
            return self._learner.to_device(source.read(rows)) if len(rows) else None

        if self._pool is None or in_memory(source):
            yield from map(prepare, parts)
            return
        under_way: deque[Future[Batch | None]] = deque()
        for place in range(len(parts)):
            for rows in parts[place + len(under_way) : place + 1 + self.ahead]:
                under_way.append(self._pool.submit(prepare, rows))
            yield under_way.popleft().result()

    def close(self, wait: bool = True) -> None:
        """Leaves no thread behind, unless nobody waits for one that may read for ever; what was made ready is dropped."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)

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
        self._queue.append((p, self._pool.submit(self.prepare, p)))

    def prepare(self, p: Progress) -> tuple[Hyper, list[Batch]]:
        """The step that follows p, on this thread."""
        hyper = self._recipe.at(p)
        parts = rows_of_step(self._config, p, hyper, self._recipe.batch.first, self._engine)
        return hyper, [self._learner.to_device(read(self._source, part, hyper, self._config, self.held)) for part in parts]

    def drain(self) -> None:
        """Waits for what is under way, and drops it."""
        while self._queue:
            self._queue.popleft()[1].exception()

    def _drop(self) -> None:
        while self._queue:
            self._queue.popleft()[1].cancel()


def in_memory(source: Source) -> bool:
    """Whether reading is copying from memory."""
    return isinstance(source, ArraySource)


def plan(config: Config, at_hand: bool, sharers: int = 1) -> tuple[int, int]:
    """(steps ahead, threads) of data.ahead and data.readers on a host of `sharers` ranks; by default none for what is at hand already.

    A thread makes a whole step ready, so there are as many steps ahead as threads, at least.
    """
    asked, readers = config.data.ahead, config.data.readers
    if asked == 0 and readers:
        raise UserError("readers have nothing to do without steps ahead", "data.readers", "data.ahead=2, or leave data.readers out")
    if asked == 0 or (asked is None and at_hand and not readers):
        return 0, 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = readers or max(1, min(cores // sharers, MOST_READERS))
    ahead = asked or max(AHEAD, threads)
    return ahead, min(threads, ahead)

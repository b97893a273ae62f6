"""Announces to a source with foresight which samples this rank reads in the next steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hvdtrain.core.progress import Progress
from hvdtrain.data.source import Source


class _Told(NamedTuple):
    """A step that has been announced to the source."""

    progress: Progress
    samples: int


class Upcoming:
    """Announces samples to the source in the order of steps, as far ahead as its foresight asks
    for.

    samples_of: returns the samples that this rank reads in the step after some progress, int64
    (n,).
    following: yields the progress after each later step, up to the end of the job.
    ranks: the number of ranks that read different blocks, including this one.
    """

    def __init__(
        self,
        source: Source,
        samples_of: Callable[[Progress], np.ndarray],
        following: Callable[[Progress], Iterator[Progress]],
        ranks: int = 1,
    ) -> None:
        self._source = source
        known = source.foresight
        self._ahead = known.divided(ranks).ahead if known else 0
        self._samples_of = samples_of
        self._following = following
        self._told: deque[_Told] = deque()
        self._samples = 0  # samples of the announced steps
        self._steps: Iterator[Progress] = iter(())

    def reads(self, progress: Progress) -> None:
        """Announces the step after `progress` and the following ones. Called before that step is
        read."""
        if not self._ahead:
            return
        # the first step, or a step other than expected
        anew = not self._told or self._told[0].progress != progress
        if anew:
            self._told.clear()
            self._samples = 0
            self._steps = self._following(progress)
        self._tell(anew)
        self._samples -= self._told.popleft().samples

    def forget(self) -> None:
        """Called if the next steps may change; the next step is announced again."""
        self._told.clear()

    def _tell(self, anew: bool) -> None:
        for progress in self._steps:
            samples = self._samples_of(progress)
            self._source.expect(samples, anew)
            anew = False
            self._told.append(_Told(progress, len(samples)))
            self._samples += len(samples)
            if self._samples > self._ahead:
                return

"""An array that a data set computes from its training samples, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0_only
from hvdtrain.data.source import Source, Unfinished
from hvdtrain.errors import UserError


class CommonArray:
    """The array that unfinished samples need. Rank 0 computes it at its first use, or reads it from
    a run folder."""

    def __init__(self, communicator: Communicator, run: Path | None = None) -> None:
        self._communicator = communicator
        self._run = run
        self._array: np.ndarray | None = None

    def finish(self, samples: Unfinished, train: Callable[[], Unfinished]) -> Source:
        """Completes the samples with the array. Every rank calls it. train() returns the training
        samples. Raises UserError if there is no array or it does not fit."""
        if self._array is None:
            run = self._run
            array = on_rank_0_only(
                self._communicator,
                (lambda: train().compute()) if run is None else (lambda: samples.read(run)),
            )
            self._array = self._broadcast(array, samples.array)
        return samples.finish(self._array)

    def measured(self, source: Source) -> Source:
        """Returns the source, with what each rank measures in its part of the samples. Every rank
        calls it. Raises on every rank the UserError of the first part. Sources that are not
        measured need no other rank."""
        if not source.is_measured:
            return source
        ranks = self._communicator
        failure = None
        part = np.empty(0)
        try:
            part = source.measure(ranks.rank, ranks.size)
        except UserError as error:
            failure = error
        failures = ranks.allgather_object(failure)
        if first := next((one for one in failures if one is not None), None):
            raise first
        return source.with_measures(np.asarray(ranks.allgather(part, "measures")))

    def _broadcast(self, array: np.ndarray | None, name: str) -> np.ndarray:
        """array: None on other ranks than 0."""
        shape, dtype = self._communicator.broadcast_object(
            None if array is None else (array.shape, array.dtype.str)
        )
        here = np.zeros(shape, dtype) if array is None else array
        return self._communicator.broadcast(here, name)

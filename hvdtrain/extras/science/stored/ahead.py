"""Keeps samples of later steps when their block is decoded. This is possible because the samples
that a rank reads are known in advance.

Dryden et al. 2021, "Clairvoyant prefetching for distributed machine learning I/O",
arXiv:2101.08734.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_Rows = dict[int, dict[str, np.ndarray]]  # sample -> its fields


class SamplesAhead:
    """Reads samples together with expected samples of the same blocks. Safe to call from several
    threads.

    most: limit for samples that are kept in memory. blocks_of: returns the block number of each
    sample, int64 (n,); negative for samples that are read individually. read: reads samples into
    new arrays.
    """

    def __init__(
        self,
        most: int,
        blocks_of: Callable[[np.ndarray], np.ndarray],
        read: Callable[[np.ndarray], Batch],
    ) -> None:
        self._most = most
        self._blocks_of = blocks_of
        self._read = read
        self._lock = threading.Lock()
        # by block: how often each sample will still be read, the next sample first
        self._due: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._kept: dict[int, Future[_Rows]] = {}  # the read that will provide each kept sample

    def expect(self, samples: np.ndarray, anew: bool) -> None:
        """Announces samples that will be read after those announced before; anew: these replace
        them."""
        blocks = self._blocks_of(samples)
        with self._lock:
            if anew:
                self._due.clear()
                self._kept.clear()
            for block, sample in zip(blocks.tolist(), samples.tolist(), strict=True):
                if block >= 0:
                    self._due[block][sample] += 1

    def read(self, samples: np.ndarray) -> Batch:
        """Returns {name: (n, *shape)} in new arrays. Raises UserError for a damaged sample."""
        reading: Future[_Rows] = Future()
        kept, missing, others = self._claim(samples.tolist(), reading)
        try:
            found = self._read(np.array([*missing, *others], np.int64)) if missing else {}
        except BaseException:
            self._withdraw(others, reading)
            raise
        reading.set_result(
            {sample: _row(found, place) for place, sample in enumerate(others, len(missing))}
        )
        if not kept and len(missing) == len(samples):
            return {name: array[: len(missing)] for name, array in found.items()}
        rows = {sample: _row(found, place) for place, sample in enumerate(missing)}
        for sample, source in kept.items():
            rows[sample] = self._taken(sample, source)
        return _stacked([rows[sample] for sample in samples.tolist()])

    def _claim(
        self, samples: Sequence[int], reading: Future[_Rows]
    ) -> tuple[dict[int, Future[_Rows]], list[int], list[int]]:
        """Returns the samples that are kept or being read by another thread, those to read, and
        others to read with them."""
        blocks = dict(
            zip(samples, self._blocks_of(np.array(samples, np.int64)).tolist(), strict=True)
        )
        with self._lock:
            for sample in samples:
                self._count_read(sample, blocks[sample])
            kept = {sample: self._kept[sample] for sample in blocks if sample in self._kept}
            missing = [sample for sample in blocks if sample not in kept]
            for sample in [
                sample for sample in kept if sample not in self._due.get(blocks[sample], ())
            ]:
                del self._kept[sample]
            # a read needs memory itself
            room = min(max(0, self._most - len(self._kept)), max(self._most // 8, len(samples)))
            near = dict.fromkeys(blocks[sample] for sample in missing)
            others = [
                sample
                for block in near
                for sample in self._due.get(block, ())
                if sample not in blocks and sample not in self._kept
            ]
            self._kept.update(dict.fromkeys(others[:room], reading))
        return kept, missing, others[:room]

    def _count_read(self, sample: int, block: int) -> None:
        due = self._due.get(block)
        if due is not None and sample in due:
            due[sample] -= 1
            if not due[sample]:
                del due[sample]
            if not due:
                del self._due[block]

    def _taken(self, sample: int, reading: Future[_Rows]) -> dict[str, np.ndarray]:
        """Returns a sample that another read has decoded; if that read failed, perhaps because of
        another sample, reads it here."""
        try:
            rows = reading.result()
        except UserError:
            return _row(self._read(np.array([sample])), 0)
        with self._lock:
            row = rows.get(sample) if self._kept.get(sample) is reading else rows.pop(sample, None)
        return _row(self._read(np.array([sample])), 0) if row is None else row

    def _withdraw(self, others: Sequence[int], reading: Future[_Rows]) -> None:
        """Withdraws samples: reads that wait for them read them themselves."""
        with self._lock:
            for sample in others:
                if self._kept.get(sample) is reading:
                    del self._kept[sample]
        reading.set_exception(UserError("neighbouring samples cannot be read", "", ""))


def _row(batch: Batch, place: int) -> dict[str, np.ndarray]:
    return {name: array[place].copy() for name, array in batch.items()}


def _stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

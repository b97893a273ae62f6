"""How old gradients are when they are applied: a histogram for each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvdtrain.core.updates import WorkerUpdate
from hvdtrain.training.telemetry.update_log import UpdateLog

_MOST_BARS = 8  # of a line


class StalenessMeter:
    """Counts staleness on rank 0; on other ranks there is nothing to count."""

    def __init__(self, log: UpdateLog | None = None) -> None:
        self._log = log
        self._of_job: dict[int, Counter[int]] = {}  # worker -> staleness -> updates

    def from_step(self, step: int) -> StalenessMeter:
        """Itself; the updates from this one on are made again."""
        if self._log:
            self._log.cut(step)
        return self

    def fields(self, updates: Sequence[WorkerUpdate]) -> dict[str, Any]:
        """The field `staleness` of the event "step", of the updates since the last one; nothing where no update is asynchronous."""
        if not updates:
            return {}
        if self._log:
            self._log.append(updates)
        found: dict[int, Counter[int]] = {}
        for update in updates:
            found.setdefault(update.worker, Counter())[update.staleness] += 1
        for worker, counts in found.items():
            self._of_job.setdefault(worker, Counter()).update(counts)
        return {"staleness": {str(worker): {str(age): n for age, n in sorted(found[worker].items())} for worker in sorted(found)}}

    def lines(self) -> list[str]:
        """For the end of a job."""
        if not self._of_job:
            return []
        every: Counter[int] = sum(self._of_job.values(), Counter())
        lines = [f"servers  staleness of an update {mean(every):.2f}, at most {max(every)}: {_bars(every)}"]
        for worker, counts in sorted(self._of_job.items()):
            lines.append(f"         worker {worker}: {counts.total():,} updates, staleness {mean(counts):.2f}, at most {max(counts)}")
        return lines


def mean(counts: Counter[int]) -> float:
    return sum(age * n for age, n in counts.items()) / counts.total()


def _bars(counts: Counter[int]) -> str:
    """0 in 12 %, 1 in 80 %, 2 in 8 %"""
    shown = [f"{age} in {counts[age] / counts.total():.0%}" for age in sorted(counts)[:_MOST_BARS]]
    return ", ".join(shown) + ", ..." * (len(counts) > _MOST_BARS)

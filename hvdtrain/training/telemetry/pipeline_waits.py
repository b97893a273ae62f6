"""How long the ranks of a job wait for each other in a pipeline, and which of those that do the same work is slowest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.core.metrics import Sums


class PipelineWaits:
    """The share of the time of its passes in which each rank of a pipeline waits for others, and the work of each stage."""

    def __init__(self, stages: Sequence[int]) -> None:
        """stages: of each rank."""
        self.predicted = 0.0  # by the schedule, if all stages took the same time
        self._stages = np.array(stages)
        self._seconds = self._waiting = self._work = np.zeros(1)  # (ranks,) of all steps
        self._steps = 0

    @property
    def _count(self) -> int:
        return int(self._stages.max()) + 1

    def of_stages(self, values: np.ndarray) -> np.ndarray:
        """(ranks,) -> (stages,): the median of the ranks of each."""
        return np.array([np.median(values[self._stages == stage]) for stage in range(self._count)])

    def slowest(self, work_ms: np.ndarray, hosts: Sequence[str]) -> dict[str, Any]:
        """Fields of events: the rank that takes longest, relative to the others of its stage, and these; work_ms: (ranks,)."""
        medians = self.of_stages(work_ms)
        times = work_ms / np.maximum(medians[self._stages], 1e-9)
        slowest = int(np.lexsort((work_ms, times.round(6)))[-1])  # where stages have one rank each, the one with most work
        beside = work_ms[self._stages == self._stages[slowest]]
        spread = [float(beside.min()), float(np.median(beside)), float(beside.max())]
        fields = {"work_ms": spread, "slowest_rank": slowest, "slowest_host": hosts[slowest]}
        if self._count == 1:
            return fields
        return fields | {"stage_work_ms": medians.tolist(), "slowest_stage": int(medians.argmax())}

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        """Fields of the event "step": `bubble`, of each rank, and what the schedule would have; nothing where there is no pipeline."""
        if "rank.waiting" not in sums:
            return {}
        seconds, waiting = np.array(sums["rank.passes"]), np.array(sums["rank.waiting"])
        self._seconds, self._waiting = self._seconds + seconds, self._waiting + waiting
        self._work, self._steps = self._work + np.array(sums["rank.work"]), self._steps + steps
        return {"bubble": _idle(seconds, waiting).tolist(), "bubble_predicted": self.predicted}

    def lines(self) -> list[str]:
        """For the end of a job."""
        if not self._seconds.max():
            return []
        idle = _idle(self._seconds, self._waiting)
        ranks = f"{idle.min():.0%} to {idle.max():.0%} of a rank"
        work_ms, waits = 1e3 * self.of_stages(self._work) / self._steps, self.of_stages(idle)
        slowest, waiting = int(work_ms.argmax()), int(waits.argmax())
        others = f"the median of stages {np.median(work_ms):.3g}" if self._count > 2 else f"stage {1 - slowest} {work_ms[1 - slowest]:.3g}"
        return [
            f"pipeline {idle.mean():.0%} of the time of its passes idle, {ranks}; {self.predicted:.0%} by its schedule with equal stages",
            f"         stage {slowest} is slowest: {work_ms[slowest]:.3g} ms of own work a step, {others}; "
            f"stage {waiting} waits most: {waits[waiting]:.0%}",
        ]


def _idle(seconds: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """(ranks,) shares of the time of the slowest rank."""
    idle: np.ndarray = 1.0 - (seconds - waiting) / max(float(seconds.max()), 1e-9)
    return idle

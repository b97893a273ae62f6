"""Measurements of ranks that share one model: how long they wait for each other, and which one is
slowest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.mesh import coordinates
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.stopwatch import PhaseTimes
from hvdtrain.training.telemetry.gauge import Gauge


def stages_of_ranks(parallel: ParallelConfig, ranks: int) -> np.ndarray:
    """Returns (ranks,): the stage of each. Ranks of one stage do the same work."""
    readers = ranks // parallel.ranks
    return np.array(
        [coordinates(rank, readers, parallel.part_ranks).stage for rank in range(ranks)]
    )


def medians_of_stages(values: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """Returns (ranks,) -> (stages,): the median of the ranks of each."""
    return np.array([np.median(values[stages == stage]) for stage in range(int(stages.max()) + 1)])


def slowest(work_ms: np.ndarray, stages: np.ndarray, hosts: Sequence[str]) -> dict[str, Any]:
    """Returns fields of events: the slowest rank relative to the others of its stage. work_ms,
    stages: (ranks,)."""
    medians = medians_of_stages(work_ms, stages)
    times = work_ms / np.maximum(medians[stages], 1e-9)
    # if stages have one rank each, the one with the most work
    slowest = int(np.lexsort((work_ms, times.round(6)))[-1])
    beside = work_ms[stages == stages[slowest]]
    spread = [float(beside.min()), float(np.median(beside)), float(beside.max())]
    fields = {"work_ms": spread, "slowest_rank": slowest, "slowest_host": hosts[slowest]}
    if len(medians) == 1:
        return fields
    return fields | {"stage_work_ms": medians.tolist(), "slowest_stage": int(medians.argmax())}


class MeshGauge(Gauge):
    """Measures each rank's communication time."""

    def __init__(self, ranks: int, learner: Learner) -> None:
        self._ranks = ranks
        self._learner = learner
        self._of_epoch = np.zeros(ranks)

    def values(self, phases: PhaseTimes) -> dict[str, float]:
        return {"rank.communication": phases.get("communication", 0.0)}

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        self._of_epoch = self._of_epoch + sums["rank.communication"]
        return {}

    def epoch_fields(self, steps: int) -> dict[str, Any]:
        found = {"rank_communication_ms": 1e3 * self._of_epoch / steps}
        self._of_epoch = np.zeros(self._ranks)
        return found if self._learner.waits_only_in_communication else {}

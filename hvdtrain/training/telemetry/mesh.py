"""The slowest rank, compared with those of its pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.mesh import coordinates
from hvdtrain.config.sections.parallel import ParallelConfig


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

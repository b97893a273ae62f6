"""The measurement of ranks that share one model: how long each communicates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.stopwatch import PhaseTimes
from hvdtrain.training.telemetry.gauge import Gauge


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


def mesh_gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> Gauge:
    """Returns the gauge of a job whose ranks share one model, as make_gauges() calls it."""
    return MeshGauge(communicator.size, learner)

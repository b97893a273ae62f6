"""The loss scale of fp16 in the events, and a line when gradients overflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.telemetry.gauge import Gauge


class LossScaleGauge(Gauge):
    """Reads the scale at each sync point, where the host waits for the device in any case."""

    def __init__(self, learner: Learner, log: Log, step: int) -> None:
        self._learner = learner
        self._log = log
        self._step = step  # of the last sync point
        self._last = learner.loss_scale()

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        before, self._last = self._last, self._learner.loss_scale()
        first = self._step + 1
        self._step += steps
        if self._last is None:
            return {}
        if before is not None and self._last < before:
            count = round(math.log2(before / self._last))
            skipped = (
                ", and the step was" if count == 1 else f" {count} times, and these steps were"
            )
            within = f"step {first}" if steps == 1 else f"steps {first} to {self._step}"
            line = (
                f"overflow in {within}: gradients of fp16 were too large{skipped} skipped; "
                f"loss scale {before:g}, now {self._last:g}"
            )
            self._log.emit("overflow", self._step, scale=[before, self._last], lines=[line])
        return {"loss_scale": self._last}

    def from_step(self, step: int) -> Gauge:
        return LossScaleGauge(self._learner, self._log, step)


def loss_scale_gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> Gauge:
    """Returns the gauge. It reports nothing if the loss is not scaled."""
    return LossScaleGauge(learner, log, step)

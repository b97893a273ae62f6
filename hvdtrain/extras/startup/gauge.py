"""Reports the phases of the start, and estimates a job's duration from its first two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import ENDLESS, Progress
from hvdtrain.events.log import Log
from hvdtrain.extras.startup import durations
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.telemetry.gauge import Gauge

LATE_S = 10.0  # up to the first sync point, at the pace of the second step
# a unit is used from this many on
_UNITS = (
    ("day", 86400.0, 2.0),
    ("h", 3600.0, 2.0),
    ("min", 60.0, 2.0),
)


class StartGauge(Gauge):
    """Adds the phases of the start to the event "started", and emits "first_step" once, after the
    second step: the first one reserves memory and compiles, so its rate is not representative.

    On a GPU the host does not wait for a step here, so only host work counts.
    """

    def __init__(
        self, config: Config, log: Log, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._began: list[tuple[Progress, float]] = []  # beginnings of the first three steps

    def started_fields(self, heartbeat: Heartbeat) -> dict[str, Any]:
        return durations.fields(heartbeat)

    def from_step(self, step: int) -> Gauge:
        return StartGauge(self._config, self._log)

    def before_step(self, p: Progress) -> None:
        if len(self._began) == 3:
            return
        self._began.append((p, self._clock()))
        if len(self._began) < 3:
            return
        (_, first_s), (second, second_s), (_, third_s) = self._began
        step_s = second_s - first_s
        rate_s = third_s - second_s
        if rate_s * self._config.log.every_steps >= LATE_S:
            left_s = (
                rate_s * (p.total - p.samples) / (p.samples - second.samples)
                if p.total < ENDLESS
                else math.inf
            )
            if self._config.stop.steps is not None:
                left_s = min(left_s, rate_s * (self._config.stop.steps - p.step))
            fields = {
                "step_s": round(step_s, 3),
                "second_s": round(rate_s, 3),
                "left_s": round(left_s, 1),
            }
            self._log.emit("first_step", p.step, **fields, lines=[_line(step_s, rate_s, left_s)])


def _line(step_s: float, rate_s: float, left_s: float) -> str:
    """Formats the line: first step 91 s, the second 64 s; about 4 days at that rate."""
    line = f"first step {step_s:.3g} s, the second {rate_s:.3g} s"
    # inf: only stop.time ends the job
    return line if left_s == math.inf else f"{line}; about {about(left_s)} at that rate"


def about(seconds: float) -> str:
    """Formats a duration: 4 days, 3 h, 25 min, 90 s."""
    for unit, unit_s, least in _UNITS:
        if seconds >= least * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}{'s' if unit == 'day' else ''}"
    return f"{seconds:.0f} s"


def startup_gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> StartGauge:
    return StartGauge(config, log)

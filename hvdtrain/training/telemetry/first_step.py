"""How long the job will take by its first step, where steps are so slow that the first figures come late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hvdtrain.config.schema import Config
from hvdtrain.core.progress import ENDLESS, Progress
from hvdtrain.events.log import Log

LATE_S = 10.0  # up to the first sync point, at the pace of the first step
_UNITS = (("day", 86400.0, 2.0), ("h", 3600.0, 2.0), ("min", 60.0, 2.0))  # a unit is used from so many of it on


class FirstStep:
    """Emits the event "first_step" once. On a GPU the host does not wait for the step here: only what keeps the host busy is slow."""

    def __init__(self, config: Config, log: Log, clock: Callable[[], float] = time.perf_counter) -> None:
        self._config, self._log, self._clock = config, log, clock
        self._began: tuple[Progress, float] | None = None
        self._is_over = False

    def before_step(self, p: Progress) -> None:
        """A step begins at p."""
        if self._is_over:
            return
        if self._began is None:
            self._began = p, self._clock()
            return
        self._is_over = True
        first, began_s = self._began
        step_s = self._clock() - began_s
        if step_s * self._config.log.every_steps >= LATE_S:
            left_s = step_s * (p.total - p.samples) / (p.samples - first.samples) if p.total < ENDLESS else math.inf
            if self._config.stop.steps is not None:
                left_s = min(left_s, step_s * (self._config.stop.steps - p.step))
            self._log.emit("first_step", p.step, step_s=round(step_s, 3), left_s=round(left_s, 1), lines=[self._line(step_s, left_s)])

    def _line(self, step_s: float, left_s: float) -> str:
        """first step 64 s; about 4 days at this rate"""
        if self._config.framework == "jax" or self._config.speed.compile != "none":
            return f"first step {step_s:.3g} s, most of which may be its compilation"
        if left_s == math.inf:  # only stop.time ends the job
            return f"first step {step_s:.3g} s"
        return f"first step {step_s:.3g} s; about {about(left_s)} at this rate"


def about(seconds: float) -> str:
    """4 days, 3 h, 25 min, 90 s"""
    for unit, unit_s, least in _UNITS:
        if seconds >= least * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}{'s' * (unit == 'day')}"
    return f"{seconds:.0f} s"

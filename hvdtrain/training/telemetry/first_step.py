"""How long the job will take by its first two steps, where steps are so slow that the first figures come late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hvdtrain.config.schema import Config
from hvdtrain.core.progress import ENDLESS, Progress
from hvdtrain.events.log import Log

LATE_S = 10.0  # up to the first sync point, at the pace of the second step
_UNITS = (("day", 86400.0, 2.0), ("h", 3600.0, 2.0), ("min", 60.0, 2.0))  # a unit is used from so many of it on


class FirstStep:
    """Emits the event "first_step" once, after the second step: the first one reserves memory and compiles, and is no rate.

    On a GPU the host does not wait for a step here: only what keeps the host busy is slow.
    """

    def __init__(self, config: Config, log: Log, clock: Callable[[], float] = time.perf_counter) -> None:
        self._config, self._log, self._clock = config, log, clock
        self._began: list[tuple[Progress, float]] = []  # of the first three steps

    def before_step(self, p: Progress) -> None:
        """A step begins at p."""
        if len(self._began) == 3:
            return
        self._began.append((p, self._clock()))
        if len(self._began) < 3:
            return
        (_, first_s), (second, second_s), (_, third_s) = self._began
        step_s, rate_s = second_s - first_s, third_s - second_s
        if rate_s * self._config.log.every_steps >= LATE_S:
            left_s = rate_s * (p.total - p.samples) / (p.samples - second.samples) if p.total < ENDLESS else math.inf
            if self._config.stop.steps is not None:
                left_s = min(left_s, rate_s * (self._config.stop.steps - p.step))
            fields = {"step_s": round(step_s, 3), "second_s": round(rate_s, 3), "left_s": round(left_s, 1)}
            self._log.emit("first_step", p.step, **fields, lines=[_line(step_s, rate_s, left_s)])


def _line(step_s: float, rate_s: float, left_s: float) -> str:
    """first step 91 s, the second 64 s; about 4 days at that rate"""
    line = f"first step {step_s:.3g} s, the second {rate_s:.3g} s"
    return line if left_s == math.inf else f"{line}; about {about(left_s)} at that rate"  # inf: only stop.time ends the job


def about(seconds: float) -> str:
    """4 days, 3 h, 25 min, 90 s"""
    for unit, unit_s, least in _UNITS:
        if seconds >= least * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}{'s' * (unit == 'day')}"
    return f"{seconds:.0f} s"

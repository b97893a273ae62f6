"""Gauges: a feature's measurements of steps on all ranks, which the telemetry reads at every sync
point."""

from __future__ import annotations

from typing import Any

from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.stopwatch import PhaseTimes


class Gauge:
    """A measurement. By default it reports nothing."""

    def values(self, phases: PhaseTimes) -> dict[str, float]:
        """Returns what this rank measured since the last sync point; `phases`: seconds. fields()
        gets the values of all ranks."""
        return {}

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        """Returns fields of the event "step"; sums: (ranks,) of each name of values(), and of
        "rank.work" in seconds. Every rank calls it."""
        return {}

    def epoch_fields(self, steps: int) -> dict[str, Any]:
        """Returns fields of the event "epoch"; steps: the number of steps since the last one."""
        return {}

    def emit(self, step: int) -> None:
        """Emits additional events after the event of an epoch. Every rank calls it."""

    def lines(self) -> list[str]:
        """Returns lines for the end of a job."""
        return []

    def from_step(self, step: int) -> Gauge:
        """Returns the gauge of the surviving ranks after a loss, which continue with that step."""
        return self

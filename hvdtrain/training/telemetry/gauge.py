"""Gauges: measurements of steps on all ranks by a feature, or by an extra in every job, which the
telemetry reads at every sync point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Progress
from hvdtrain.frameworks.stopwatch import PhaseTimes
from hvdtrain.training.health.heartbeat import Heartbeat


class Gauge:
    """A measurement. By default it reports nothing.

    energy_kinds: of hardware whose energy it measures, "gpu" and "cpu".
    """

    energy_kinds: Sequence[str] = ()

    def start_fields(self) -> dict[str, Any]:
        """Returns fields of the event "start"."""
        return {}

    def header_lines(self) -> list[str]:
        """Returns lines of the header."""
        return []

    def device_words(self) -> list[str]:
        """Returns words for the header's line about what devices achieve."""
        return []

    def started_fields(self, heartbeat: Heartbeat) -> dict[str, Any]:
        """Returns fields of the event "started"."""
        return {}

    def before_step(self, p: Progress) -> None:
        """Called when a step begins at p."""
        self.keep_up()

    def keep_up(self) -> None:
        """Called before each step and each batch of an evaluation."""

    def close(self, step: int) -> None:
        """Called at the end of the job, when `step` steps are done."""

    def sync_sums(self) -> Sums:
        """Returns sums of this rank at a sync point; fields() gets those of all ranks."""
        return {}

    def read_sums(self) -> Sums:
        """Returns sums of this rank at the end of an evaluation and of the job; evaluated() gets
        those of all ranks."""
        return {}

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

    def evaluated(self, sums: Sums) -> None:
        """Receives the sums of an evaluation over all ranks."""

    def emit(self, step: int) -> None:
        """Emits additional events after the event of an epoch. Every rank calls it."""

    def lines(self) -> list[str]:
        """Returns lines for the end of a job."""
        return []

    def from_step(self, step: int) -> Gauge:
        """Returns the gauge of the surviving ranks after a loss, which continue with that step."""
        return self

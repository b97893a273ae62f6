"""The phases of a JAX learner's step, as far as they are timed."""

from __future__ import annotations

from typing import Any

import jax

from hvdtrain.frameworks.stopwatch import Stopwatch


class Phases:
    """JAX only starts its work. Phases are timed where the host waits for it: before it communicates, or as log.step_times asks."""

    def __init__(self, stopwatch: Stopwatch, communicates: bool, waits: bool) -> None:
        """waits: the host waits for the device at the end of each phase, to time it."""
        self._stopwatch, self._waits = stopwatch, waits
        self.are_timed = waits or communicates

    def begin(self) -> None:
        """The end of "data"."""
        self._stopwatch.enter("compute" if self.are_timed else "")

    def enter(self, phase: str) -> None:
        if self.are_timed:
            self._stopwatch.enter(phase)

    def wait_for(self, arrays: Any) -> None:
        if self._waits:
            jax.block_until_ready(arrays)

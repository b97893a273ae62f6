"""A hook that logs how long a rank's processor computed in each step, whatever else the machine does.

`hooks=[processor_time:ProcessorTime]`, with this folder in PYTHONPATH.
"""  # noqa: E501

from __future__ import annotations

import time

import hvdtrain
from hvdtrain.frameworks.stopwatch import PhaseTimes, Stopwatch


class ComputingStopwatch:
    """Adds up the processor time of this thread outside the phase "communication", and passes the
    phases on to another stopwatch.

    A thread that waits for a core, for a lock or for a message in its sleep uses no processor time.
    One that waits for a message in MPI does: so communication is left out.
    """

    def __init__(self, within: Stopwatch) -> None:
        self._within = within
        self._phase = ""
        self._began_s = 0.0
        self.computed_s = 0.0

    def enter(self, phase: str) -> None:
        now_s = time.thread_time()  # half a microsecond
        if self._phase not in ("", "communication"):
            self.computed_s += now_s - self._began_s
        self._phase = phase
        self._began_s = now_s
        self._within.enter(phase)

    def read(self) -> list[PhaseTimes]:
        return self._within.read()


class ProcessorTime(hvdtrain.Hook):
    """Logs `computing_ms` of a step, of which events have the mean over the ranks."""

    def on_start(self, training: hvdtrain.Training) -> None:
        # no public name has the stopwatch of the trainer
        replaceable = training._learner.stopwatch  # type: ignore[attr-defined]
        self._stopwatch = ComputingStopwatch(replaceable.current)
        replaceable.current = self._stopwatch

    def after_step(self, training: hvdtrain.Training) -> None:
        training.log(computing_ms=1e3 * self._stopwatch.computed_s)
        self._stopwatch.computed_s = 0.0

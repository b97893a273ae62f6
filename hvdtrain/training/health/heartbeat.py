"""Where this rank is: written by the main thread at each phase, read by the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.frameworks.learner import UnderWay


@dataclass
class Heartbeat:
    """A few attributes: a beat costs less than a microsecond."""

    phase: str = "starting"  # what the main thread is doing, for people: "reading samples", "step", "evaluation"
    epoch: int = 0  # whole epochs done
    step: int = 0  # steps done
    beats: int = 0  # grows with every beat: as long as it does not, the rank makes no progress
    limit: Literal["start_s", "stall_s"] = "start_s"  # the key of guard that says how long the phase may last
    training: bool = False  # the loop has begun: a signal stops the job with a checkpoint
    started_s: float = field(default_factory=time.monotonic)
    owns_process: bool = True  # the process was started for this job: its own start belongs to that of the job
    start_marks: dict[str, float] = field(default_factory=dict)  # when each phase of the start began; "": the end of the first step
    in_start: bool = True  # up to there
    place: str = ""  # of this rank in the mesh: "stage 1, data 0"
    under_way: Callable[[], UnderWay | None] = lambda: None  # the stage or the layer that this rank is in; from any thread

    def beat(self, phase: str, epoch: int, step: int) -> None:
        """The phase begins, or goes on, after so many whole epochs and steps."""
        if self.in_start:
            self.in_start = "step" not in self.start_marks
            self.start_marks.setdefault(phase if self.in_start else "", time.monotonic())
        self.phase, self.epoch, self.step = phase, epoch, step
        self.beats += 1

    def go_on(self) -> None:
        """The phase makes progress."""
        self.beats += 1

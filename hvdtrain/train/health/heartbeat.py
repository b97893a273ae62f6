"""Where this rank is: written by the main thread at every turn, read by the watch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Heartbeat:
    """A few attributes: a beat costs less than a microsecond."""

    phase: str = "starting"  # what the main thread is doing, for people: "reading samples", "step", "evaluation"
    epoch: int = 0  # whole epochs done
    step: int = 0  # steps done
    beats: int = 0  # grows with every beat: a watch that sees it stand still sees no progress
    training: bool = False  # past the start: the first steps are done, and there may be something to lose
    patient: bool = True  # what is done now has guard.start_s, not guard.stall_s
    started_s: float = field(default_factory=time.monotonic)
    marks: dict[str, float] = field(default_factory=dict)  # when each phase of the start began, and "" at the end of the first step
    opening: bool = True  # up to there
    of_process: bool = True  # the process began for this job: what it took before belongs to the start

    def beat(self, phase: str, epoch: int, step: int) -> None:
        if self.opening:
            self.opening = "step" not in self.marks
            self.marks.setdefault(phase if self.opening else "", time.monotonic())
        self.phase, self.epoch, self.step = phase, epoch, step
        self.beats += 1

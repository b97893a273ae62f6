"""The progress of this rank: written by the main thread at each phase, read by the watchdog, and
shown with errors of the user's code."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.core.own_line import own_frame
from hvdtrain.frameworks.learner import CurrentPass


@dataclass
class Heartbeat:
    """The current phase and position of this rank; a beat costs less than a microsecond."""

    # activity of the main thread, for people: "reading samples", "step", "evaluation"
    phase: str = "starting"
    epoch: int = 0  # whole epochs done
    step: int = 0  # steps done
    beats: int = 0  # incremented at every beat; while it is constant, the rank makes no progress
    limit: Literal["start_s", "stall_s"] = "start_s"  # the key of guard that limits the phase
    training: bool = False  # the loop has begun: a signal stops the job with a checkpoint
    started_s: float = field(default_factory=time.monotonic)
    owns_process: bool = (
        True  # the process was started for this job, so its own startup counts, too
    )
    # when each phase of the startup began; "": the end of the first step
    start_marks: dict[str, float] = field(default_factory=dict)
    in_start: bool = True  # until the first step ends
    place: str = ""  # place of this rank in the mesh: "stage 1, data 0"
    # the stage or the layer that this rank is in; from any thread
    under_way: Callable[[], CurrentPass | None] = lambda: None

    def beat(self, phase: str, epoch: int, step: int) -> None:
        """Records that a phase begins or continues, after `epoch` whole epochs and `step` steps."""
        if self.in_start:
            self.in_start = "step" not in self.start_marks
            self.start_marks.setdefault(phase if self.in_start else "", time.monotonic())
        self.phase = phase
        self.epoch = epoch
        self.step = step
        self.beats += 1

    def go_on(self) -> None:
        """Records progress within the phase."""
        self.beats += 1


_IN_STEP = ("reading samples", "step")  # phases of the heartbeat that belong to the next step


@contextlib.contextmanager
def noted(heartbeat: Heartbeat, rank: int) -> Iterator[None]:
    """Adds a note to exceptions from the user's code; it appears at the end of the traceback and of
    hvdtrain's message."""
    try:
        yield
    except Exception as error:
        _note(error, heartbeat, rank)
        raise


def _note(error: Exception, heartbeat: Heartbeat, rank: int) -> None:
    frame = own_frame(error)
    if frame is not None and not hasattr(error, "__notes__"):
        line = f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
        error.add_note(
            f"rank {rank} on {socket.gethostname()}{place_and_pass(heartbeat)}, "
            f"{_when(heartbeat)}: {line}"
        )


def place_and_pass(heartbeat: Heartbeat) -> str:
    """Returns for example " (stage 1, data 0), in the forward pass of micro-batch 2 in stage 1";
    empty if every rank has a whole model."""
    under_way = heartbeat.under_way()
    return (f" ({heartbeat.place})" if heartbeat.place else "") + (
        f", in the {under_way.text}" if under_way else ""
    )


def _when(heartbeat: Heartbeat) -> str:
    if not heartbeat.training:
        return heartbeat.phase
    if heartbeat.phase in _IN_STEP:
        return f"step {heartbeat.step + 1} ({heartbeat.phase})"
    return f"{heartbeat.phase} after step {heartbeat.step}"

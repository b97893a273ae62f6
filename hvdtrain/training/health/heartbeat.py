"""Where this rank is: written by the main thread at each phase, read by the watchdog, and told with
an error of the user's own code."""

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
    """A few attributes: a beat costs less than a microsecond."""

    # what the main thread is doing, for people: "reading samples", "step", "evaluation"
    phase: str = "starting"
    epoch: int = 0  # whole epochs done
    step: int = 0  # steps done
    beats: int = 0  # grows with every beat: as long as it does not, the rank makes no progress
    limit: Literal["start_s", "stall_s"] = (
        "start_s"  # the key of guard that says how long the phase may last
    )
    training: bool = False  # the loop has begun: a signal stops the job with a checkpoint
    started_s: float = field(default_factory=time.monotonic)
    owns_process: bool = (
        True  # the process was started for this job: its own start belongs to that of the job
    )
    # when each phase of the start began; "": the end of the first step
    start_marks: dict[str, float] = field(default_factory=dict)
    in_start: bool = True  # up to there
    place: str = ""  # of this rank in the mesh: "stage 1, data 0"
    # the stage or the layer that this rank is in; from any thread
    under_way: Callable[[], CurrentPass | None] = lambda: None

    def beat(self, phase: str, epoch: int, step: int) -> None:
        """The phase begins, or goes on, after so many whole epochs and steps."""
        if self.in_start:
            self.in_start = "step" not in self.start_marks
            self.start_marks.setdefault(phase if self.in_start else "", time.monotonic())
        self.phase = phase
        self.epoch = epoch
        self.step = step
        self.beats += 1

    def go_on(self) -> None:
        """The phase makes progress."""
        self.beats += 1


_IN_STEP = ("reading samples", "step")  # phases of the heartbeat that belong to the next step


@contextlib.contextmanager
def noted(heartbeat: Heartbeat, rank: int) -> Iterator[None]:
    """An exception inside that came from the user's code gets a note, which its traceback and
    hvdtrain's message end with."""
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
    """ " (stage 1, data 0), in the forward pass of micro-batch 2 in stage 1"; empty where every rank
    has a whole model."""  # noqa: E501
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

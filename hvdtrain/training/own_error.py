"""What is known of an exception in the user's own code: its line, the rank, the step, and what the rank was doing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from hvdtrain.core.own_line import own_frame
from hvdtrain.training.health.heartbeat import Heartbeat

_IN_STEP = ("reading samples", "step")  # phases of the heartbeat that belong to the next step


@contextlib.contextmanager
def noted(heartbeat: Heartbeat, rank: int) -> Iterator[None]:
    """An exception inside that came from the user's code gets a note, which its traceback and hvdtrain's message end with."""
    try:
        yield
    except Exception as error:
        _note(error, heartbeat, rank)
        raise


def _note(error: Exception, heartbeat: Heartbeat, rank: int) -> None:
    frame = own_frame(error)
    if frame is not None and not hasattr(error, "__notes__"):
        line = f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
        error.add_note(f"rank {rank} on {socket.gethostname()}{place_and_pass(heartbeat)}, {_when(heartbeat)}: {line}")


def place_and_pass(heartbeat: Heartbeat) -> str:
    """ " (stage 1, data 0), in the forward pass of micro-batch 2 in stage 1"; empty where every rank has a whole model."""
    under_way = heartbeat.under_way()
    return (f" ({heartbeat.place})" if heartbeat.place else "") + (f", in the {under_way.text}" if under_way else "")


def _when(heartbeat: Heartbeat) -> str:
    if not heartbeat.training:
        return heartbeat.phase
    if heartbeat.phase in _IN_STEP:
        return f"step {heartbeat.step + 1} ({heartbeat.phase})"
    return f"{heartbeat.phase} after step {heartbeat.step}"

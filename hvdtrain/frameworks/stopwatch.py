"""Stopwatches: how long each phase of a step takes on this rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

# data: waiting for samples. compute: forward and backward, if a framework compiles both as one
# program. communication: waiting for the gradients of other ranks, without overlapped work. update:
# checks, clipping and the optimizer.
PHASES = ("data", "forward", "backward", "compute", "communication", "update")

PhaseTimes = dict[str, float]  # seconds of each phase of one step


class Stopwatch(Protocol):
    """A step begins with enter("data") and ends with enter("")."""

    def enter(self, phase: str) -> None:
        """Ends the current phase and begins this one. A phase may occur several times in a step.
        Takes half a microsecond."""

    def read(self) -> list[PhaseTimes]:
        """Returns the phases of each step since the last read. The host waits for the device
        here."""


class HostStopwatch:
    """Uses the clock of this process. That is right on a CPU, where work ends when its call
    returns, or with a `wait` for the device."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait
        self._stamps: list[tuple[str, float]] = []

    def enter(self, phase: str) -> None:
        if (
            not self._stamps and phase != "data"
        ):  # no step began with "data": a learner that is used without the trainer
            return
        if self._wait:
            self._wait()
        self._stamps.append((phase, time.perf_counter()))

    def read(self) -> list[PhaseTimes]:
        stamps = self._stamps
        self._stamps = []
        return phase_times([(phase, b - a) for (phase, a), (_, b) in itertools.pairwise(stamps)])


class ReplaceableStopwatch:
    """The stopwatch that a learner and its strategy share; a profile or a benchmark puts another
    one in its place for a while."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.current = stopwatch
        self._phase = ""

    def enter(self, phase: str) -> None:
        self._phase = phase
        self.current.enter(phase)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Counts the time inside as a step's communication, then resumes the phase before it."""
        before = self._phase
        if not before:  # between steps
            yield
            return
        self.enter("communication")
        try:
            yield
        finally:
            self.enter(before)

    def read(self) -> list[PhaseTimes]:
        return self.current.read()

    @contextmanager
    def replaced_by(self, other: Stopwatch) -> Iterator[None]:
        """Sends phases that are entered within the context to `other`."""
        before = self.current
        self.current = other
        try:
            yield
        finally:
            self.current = before


def phase_times(pieces: Sequence[tuple[str, float]]) -> list[PhaseTimes]:
    """Returns the steps, each from "data" to "", as (phase, seconds) in order."""
    steps: list[PhaseTimes] = []
    for phase, seconds in pieces:
        if phase == "data":
            steps.append({})
        if phase:
            steps[-1][phase] = steps[-1].get(phase, 0.0) + seconds
    return steps


def total(steps: Sequence[PhaseTimes]) -> PhaseTimes:
    """Returns the seconds of each phase over some steps."""
    return {
        phase: sum(step.get(phase, 0.0) for step in steps)
        for phase in PHASES
        if any(phase in step for step in steps)
    }

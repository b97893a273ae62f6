"""When the passes of a run were made: as the host sees it, or on a GPU that makes them later."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch

from hvdtrain.comm.staging import Accelerator
from hvdtrain.extras.pipeline.schedule import Action
from hvdtrain.frameworks.learner import TimedPass

Mark = Any  # seconds, or an event of a GPU


class Times(Protocol):
    """A clock."""

    def mark(self) -> Mark:
        """Returns now, or after the present work of the GPU."""

    def seconds(self, mark: Mark) -> float:
        """Returns the seconds of time.perf_counter(), and waits for the GPU to reach the mark."""


class HostTimes:
    """The clock of a host that waits for each message."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        return float(mark)


class DeviceTimes:
    """The clock of a GPU, which waits for messages while the host does not."""

    def __init__(self, gpus: Accelerator, device: torch.device) -> None:
        self._gpus = gpus
        self._device = device
        self._first = self.mark()
        self._first_s = time.perf_counter()

    def mark(self) -> Mark:
        return self._gpus.timed_mark(self._gpus.present(self._device))

    def seconds(self, mark: Mark) -> float:
        mark.synchronize()
        return self._first_s + 1e-3 * float(self._first.elapsed_time(mark))


class Between(NamedTuple):
    """A span of time."""

    began: Mark
    ended: Mark

    def seconds(self, times: Times) -> float:
        return times.seconds(self.ended) - times.seconds(self.began)


class MarkedPass(NamedTuple):
    """A pass with its waits for other ranks."""

    action: Action
    number: int  # of the micro-batch in the step
    span: Between
    waits: list[Between]


class Spent(NamedTuple):
    """The time of one rank in one step."""

    seconds: float  # total
    waiting: float  # part of it spent waiting for other ranks


class MarkedRun(NamedTuple):
    """All passes of a step. Its methods wait for a GPU that has not made them yet."""

    times: Times
    span: Between
    waits: list[Between]
    passes: list[MarkedPass]

    def spent(self) -> Spent:
        return Spent(self.span.seconds(self.times), self._waited(self.waits))

    def timed_passes(self) -> list[TimedPass]:
        return [
            TimedPass(
                each.action.kind,
                each.action.stage,
                each.number,
                self.times.seconds(each.span.began),
                self.times.seconds(each.span.ended),
                self._waited(each.waits),
            )
            for each in self.passes
        ]

    def _waited(self, waits: list[Between]) -> float:
        return sum(wait.seconds(self.times) for wait in waits)

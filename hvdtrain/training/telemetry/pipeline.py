"""A pipeline's passes of one step on one clock, and how long its ranks wait for each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.learner import TimedPass

MOST_PASSES = 4096  # of an event


def gather_passes(communicator: Communicator, own: Sequence[TimedPass], apart: int) -> dict[str, Any]:
    """Fields of the event, of ranks 0, `apart`, 2 x `apart`, ...: one pipeline. Every rank calls it.

    Empty where there are more than MOST_PASSES.
    """
    mine = [tuple(each) for each in own] if communicator.rank % apart == 0 else []
    found = [[TimedPass(*each) for each in of_rank] for of_rank in communicator.allgather_object(mine)[::apart]]
    if not 0 < sum(map(len, found)) <= MOST_PASSES:
        return {}
    aligned = on_one_clock(found)
    begin_s = min(each.start_s for of_rank in aligned for each in of_rank)
    rows = [[_row(each, begin_s) for each in of_rank] for of_rank in aligned]
    return {"passes": rows, "passes_of_ranks": [rank * apart for rank in range(len(rows))]}


def _row(one: TimedPass, begin_s: float) -> list[Any]:
    """[kind, stage, micro-batch, begin of waiting, begin of computing, end], in milliseconds since the first pass."""
    times_s = one.start_s, one.start_s + one.waited_s, one.stop_s
    return [one.kind, one.stage, one.micro, *(round(1e3 * (time_s - begin_s), 3) for time_s in times_s)]


def on_one_clock(ranks: Sequence[Sequence[TimedPass]]) -> list[list[TimedPass]]:
    """The passes of each rank by the first one's clock.

    Ranks of one host have one clock. Those of two hosts do not: nothing arrives before it was sent, in both directions, which bounds how
    far the second clock is ahead; where 0 is not within the bounds, it is taken to be in their middle (as Mills 1991, RFC 5905, does).
    """
    moved, total_s = [list(ranks[0])], 0.0
    for before, passes in itertools.pairwise(ranks):
        least, most = _bounds(before, passes)
        if not least <= 0.0 <= most and math.isfinite(least) and math.isfinite(most):
            total_s += (least + most) / 2
        moved.append([one._replace(start_s=one.start_s - total_s, stop_s=one.stop_s - total_s) for one in passes])
    return moved


def _bounds(first: Sequence[TimedPass], second: Sequence[TimedPass]) -> tuple[float, float]:
    """The least and the most seconds by which the clock of `second` may be ahead."""
    passes = {(one.kind == "forward", one.stage, one.micro): one for one in first if one.kind != "weight gradient"}
    least, most = -math.inf, math.inf
    for two in second:
        one = passes.get((two.kind == "forward", two.stage - 1, two.micro))
        if one is None or two.kind == "weight gradient":
            continue
        if two.kind == "forward":  # one sends, when its pass is over; two begins to compute later
            most = min(most, two.start_s + two.waited_s - one.stop_s)
        else:
            least = max(least, two.stop_s - one.start_s - one.waited_s)
    return least, most


class PipelineWaits:
    """The share of the time of its passes in which each rank of a pipeline waits for others, and the work of each stage."""

    def __init__(self, stages: Sequence[int]) -> None:
        """stages: of each rank."""
        self.predicted = 0.0  # by the schedule, if all stages took the same time
        self._stages = np.array(stages)
        self._seconds = self._waiting = self._work = np.zeros(1)  # (ranks,) of all steps
        self._steps = 0

    @property
    def _count(self) -> int:
        return int(self._stages.max()) + 1

    def of_stages(self, values: np.ndarray) -> np.ndarray:
        """(ranks,) -> (stages,): the median of the ranks of each."""
        return np.array([np.median(values[self._stages == stage]) for stage in range(self._count)])

    def slowest(self, work_ms: np.ndarray, hosts: Sequence[str]) -> dict[str, Any]:
        """Fields of events: the rank that takes longest, relative to the others of its stage, and these; work_ms: (ranks,)."""
        medians = self.of_stages(work_ms)
        times = work_ms / np.maximum(medians[self._stages], 1e-9)
        slowest = int(np.lexsort((work_ms, times.round(6)))[-1])  # where stages have one rank each, the one with most work
        beside = work_ms[self._stages == self._stages[slowest]]
        spread = [float(beside.min()), float(np.median(beside)), float(beside.max())]
        fields = {"work_ms": spread, "slowest_rank": slowest, "slowest_host": hosts[slowest]}
        if self._count == 1:
            return fields
        return fields | {"stage_work_ms": medians.tolist(), "slowest_stage": int(medians.argmax())}

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        """Fields of the event "step": `bubble`, of each rank, and what the schedule would have; nothing where there is no pipeline."""
        if "rank.waiting" not in sums:
            return {}
        seconds, waiting = np.array(sums["rank.passes"]), np.array(sums["rank.waiting"])
        self._seconds, self._waiting = self._seconds + seconds, self._waiting + waiting
        self._work, self._steps = self._work + np.array(sums["rank.work"]), self._steps + steps
        return {"bubble": _idle(seconds, waiting).tolist(), "bubble_predicted": self.predicted}

    def lines(self) -> list[str]:
        """For the end of a job."""
        if not self._seconds.max():
            return []
        idle = _idle(self._seconds, self._waiting)
        ranks = f"{idle.min():.0%} to {idle.max():.0%} of a rank"
        work_ms, waits = 1e3 * self.of_stages(self._work) / self._steps, self.of_stages(idle)
        slowest, waiting = int(work_ms.argmax()), int(waits.argmax())
        others = f"the median of stages {np.median(work_ms):.3g}" if self._count > 2 else f"stage {1 - slowest} {work_ms[1 - slowest]:.3g}"
        return [
            f"pipeline {idle.mean():.0%} of the time of its passes idle, {ranks}; {self.predicted:.0%} by its schedule with equal stages",
            f"         stage {slowest} is slowest: {work_ms[slowest]:.3g} ms of own work a step, {others}; "
            f"stage {waiting} waits most: {waits[waiting]:.0%}",
        ]


def _idle(seconds: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """(ranks,) shares of the time of the slowest rank."""
    idle: np.ndarray = 1.0 - (seconds - waiting) / max(float(seconds.max()), 1e-9)
    return idle

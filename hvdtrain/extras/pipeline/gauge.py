"""The measurements of a pipeline: the share of its passes that each rank waits, and the passes of a
step on one clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Log
from hvdtrain.extras.pipeline.keys import PipelineKeys
from hvdtrain.frameworks.learner import Learner, TimedPass
from hvdtrain.frameworks.stopwatch import PhaseTimes
from hvdtrain.training.telemetry.gauge import Gauge
from hvdtrain.training.telemetry.mesh import medians_of_stages, stages_of_ranks

MOST_PASSES = 4096  # passes in an event


def gather_passes(
    communicator: Communicator, own: Sequence[TimedPass], apart: int
) -> dict[str, Any]:
    """Returns the event's fields for ranks 0, `apart`, 2 x `apart`, ..., which are one pipeline.
    Every rank calls it.

    Empty if there are more than MOST_PASSES.
    """
    mine = [tuple(each) for each in own] if communicator.rank % apart == 0 else []
    found = [
        [TimedPass(*each) for each in of_rank]
        for of_rank in communicator.allgather_object(mine)[::apart]
    ]
    if not 0 < sum(map(len, found)) <= MOST_PASSES:
        return {}
    aligned = on_one_clock(found)
    begin_s = min(each.start_s for of_rank in aligned for each in of_rank)
    rows = [[_row(each, begin_s) for each in of_rank] for of_rank in aligned]
    return {"passes": rows, "passes_of_ranks": [rank * apart for rank in range(len(rows))]}


def _row(one: TimedPass, begin_s: float) -> list[Any]:
    """Returns [kind, stage, micro-batch, begin of waiting, begin of computing, end], in
    milliseconds since the first pass."""
    times_s = one.start_s, one.start_s + one.waited_s, one.stop_s
    return [
        one.kind,
        one.stage,
        one.micro,
        *(round(1e3 * (time_s - begin_s), 3) for time_s in times_s),
    ]


def on_one_clock(ranks: Sequence[Sequence[TimedPass]]) -> list[list[TimedPass]]:
    """Converts the passes of each rank to the first rank's clock.

    Ranks on one host share a clock; ranks on two hosts do not. No message arrives before it was
    sent, in either direction, which bounds the offset of the second clock. If 0 is not within the
    bounds, their midpoint is used (as in Mills 1991, RFC 5905).
    """
    moved = [list(ranks[0])]
    total_s = 0.0
    for before, passes in itertools.pairwise(ranks):
        least, most = _bounds(before, passes)
        if not least <= 0.0 <= most and math.isfinite(least) and math.isfinite(most):
            total_s += (least + most) / 2
        moved.append(
            [
                one._replace(start_s=one.start_s - total_s, stop_s=one.stop_s - total_s)
                for one in passes
            ]
        )
    return moved


def _bounds(first: Sequence[TimedPass], second: Sequence[TimedPass]) -> tuple[float, float]:
    """Returns the smallest and largest seconds by which the clock of `second` may be ahead."""
    passes = {
        (one.kind == "forward", one.stage, one.micro): one
        for one in first
        if one.kind != "weight gradient"
    }
    least = -math.inf
    most = math.inf
    for two in second:
        one = passes.get((two.kind == "forward", two.stage - 1, two.micro))
        if one is None or two.kind == "weight gradient":
            continue
        if two.kind == "forward":  # one sends, when its pass is over; two begins to compute later
            most = min(most, two.start_s + two.waited_s - one.stop_s)
        else:
            least = max(least, two.stop_s - one.start_s - one.waited_s)
    return least, most


class PipelineGauge(Gauge):
    """Measures the share of the passes that each rank spends waiting for others."""

    def __init__(
        self, config: Config, communicator: Communicator, learner: Learner, log: Log
    ) -> None:
        self._communicator = communicator
        self._learner = learner
        self._log = log
        parallel = PipelineKeys.of(config)
        self._pipeline = parallel.pipeline
        self._stages = stages_of_ranks(parallel, communicator.size)
        self._predicted = 0.0  # idle share predicted from the schedule with equally slow stages
        self._seconds = self._waiting = self._work = np.zeros(1)  # (ranks,) of all steps
        self._of_epoch = np.zeros(communicator.size)  # seconds of waiting
        self._steps = 0

    def values(self, phases: PhaseTimes) -> dict[str, float]:
        waited = self._learner.read_waited()
        self._predicted = waited.predicted if waited else 0.0
        return {"rank.passes": waited.seconds, "rank.waiting": waited.waiting} if waited else {}

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        """Returns fields with `bubble`, the idle share of each rank, and the schedule's ideal
        value."""
        if "rank.waiting" not in sums:
            return {}
        seconds = np.array(sums["rank.passes"])
        waiting = np.array(sums["rank.waiting"])
        self._of_epoch = self._of_epoch + waiting
        self._seconds = self._seconds + seconds
        self._waiting = self._waiting + waiting
        self._work = self._work + np.array(sums["rank.work"])
        self._steps = self._steps + steps
        return {"bubble": _idle(seconds, waiting).tolist(), "bubble_predicted": self._predicted}

    def epoch_fields(self, steps: int) -> dict[str, Any]:
        found = {"rank_waiting_ms": 1e3 * self._of_epoch / steps}
        self._of_epoch = np.zeros(self._communicator.size)
        return found if self._learner.waits_only_in_communication else {}

    def emit(self, step: int) -> None:
        """Emits the event "passes" of the last step of the pipeline that reads the first
        samples."""
        passes = gather_passes(
            self._communicator,
            self._learner.last_passes(),
            self._communicator.size // self._pipeline,
        )
        if passes:
            self._log.emit("passes", step, **passes)

    def lines(self) -> list[str]:
        if not self._seconds.max():
            return []
        idle = _idle(self._seconds, self._waiting)
        ranks = f"{idle.min():.0%} to {idle.max():.0%} of a rank"
        work_ms = 1e3 * medians_of_stages(self._work, self._stages) / self._steps
        waits = medians_of_stages(idle, self._stages)
        slowest = int(work_ms.argmax())
        waiting = int(waits.argmax())
        others = (
            f"the median of stages {np.median(work_ms):.3g}"
            if len(work_ms) > 2
            else f"stage {1 - slowest} {work_ms[1 - slowest]:.3g}"
        )
        return [
            f"pipeline {idle.mean():.0%} of the time of its passes idle, {ranks}; "
            f"{self._predicted:.0%} by its schedule with equal stages",
            f"         stage {slowest} is slowest: {work_ms[slowest]:.3g} ms of own work a step, "
            f"{others}; "
            f"stage {waiting} waits most: {waits[waiting]:.0%}",
        ]


def _idle(seconds: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """Returns (ranks,) idle shares of the slowest rank's time."""
    idle: np.ndarray = 1.0 - (seconds - waiting) / max(float(seconds.max()), 1e-9)
    return idle


def pipeline_gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> PipelineGauge:
    return PipelineGauge(config, communicator, learner, log)

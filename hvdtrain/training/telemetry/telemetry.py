"""Measurements of the steps of all ranks, combined at sync points: seconds of each phase, the
slowest rank, memory, and what gauges measure."""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.plugins import named
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import gauges_of_every_job, implementing_module
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Log
from hvdtrain.events.rank_log import LOGGER
from hvdtrain.features.every_feature import FEATURES
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.stopwatch import PHASES, PhaseTimes, total
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.progress.event_fields import energy_fields
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.telemetry.gauge import Gauge
from hvdtrain.training.telemetry.mesh import slowest, stages_of_ranks


def make_telemetry(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    hosts: list[str],
    log: Log,
    gauges: Sequence[Gauge] = (),
) -> Telemetry:
    """Returns the telemetry of a configuration, with these gauges."""
    return Telemetry(
        communicator,
        learner,
        hosts,
        log,
        stages=stages_of_ranks(config.parallel, communicator.size),
        step_times=config.log.step_times,
        gauges=gauges,
    )


def make_gauges(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> list[Gauge]:
    """Creates the gauges of a configuration's features and of extras, for a job that continues with
    `step`. Every rank calls it."""
    gauges: list[Gauge] = []
    if config.profile.steps is not None:
        profiler = implementing_module("profile.steps")
        gauges.append(profiler.gauge(config, communicator, learner, log, run, step))
    makers = [feature.gauge for feature in FEATURES if feature.gauge and feature.on(config)]
    for maker in (*makers, *gauges_of_every_job()):
        gauges.append(named(maker)(config, communicator, learner, log, run, step))
    return gauges


class Telemetry:
    """Measures the steps, one object on each rank. The result of sync_sums() is summed over ranks
    with the sums of training; sync_fields() converts it to an event's fields.

    stages: (ranks,), the stage of each, whose ranks do the same work; None: one. step_times: an
    event for each step (log.step_times).
    """

    def __init__(
        self,
        communicator: Communicator,
        learner: Learner,
        hosts: list[str],
        log: Log,
        *,
        stages: np.ndarray | None = None,
        step_times: bool = False,
        gauges: Sequence[Gauge] = (),
    ) -> None:
        self._communicator = communicator
        self._learner = learner
        self.log = log
        self._hosts = hosts  # host of each rank
        self.step_times = step_times
        self._steps: list[PhaseTimes] = []  # steps of this rank since the last sync point
        # seconds that each rank was busy since the last evaluation
        self._epoch_work_s = np.zeros(communicator.size)
        self._epoch_steps = 0
        self._stages = np.zeros(communicator.size, int) if stages is None else stages
        self.gauges = gauges

    def before_step(self, p: Progress) -> None:
        """Called when a step begins at p."""
        for gauge in self.gauges:
            gauge.before_step(p)
        self._learner.stopwatch.enter("data")

    def keep_up(self) -> None:
        """Called before each batch of an evaluation."""
        for gauge in self.gauges:
            gauge.keep_up()

    @property
    def energy_kinds(self) -> list[str]:
        """The kinds of hardware whose energy is measured."""
        return [kind for gauge in self.gauges for kind in gauge.energy_kinds]

    def start_fields(self) -> dict[str, Any]:
        """Returns the gauges' fields of the event "start"."""
        return _merged(gauge.start_fields() for gauge in self.gauges)

    def started_fields(self, heartbeat: Heartbeat) -> dict[str, Any]:
        """Returns the gauges' fields of the event "started"."""
        return _merged(gauge.started_fields(heartbeat) for gauge in self.gauges)

    def read_sums(self) -> Sums:
        """Returns the gauges' sums of this rank at the end of an evaluation and of the job."""
        return _merged(gauge.read_sums() for gauge in self.gauges)

    def sync_sums(self) -> Sums:
        """Returns sums of this rank since the last sync point, to sum over ranks; the host waits
        for the device here."""
        self._steps = self._learner.stopwatch.read()
        phases = total(self._steps)
        gpu = self._learner.gpu()
        of_gauges = _merged(gauge.values(phases) for gauge in self.gauges)
        return {
            **{f"phase.{phase}": phases.get(phase, 0.0) for phase in PHASES},
            "rank.work": self._of_this_rank(_work_s(phases)),
            "rank.memory": self._of_this_rank(peak_memory_bytes()),
            "rank.gpu_memory": self._of_this_rank(gpu.peak_bytes() if gpu else 0),
            **{name: self._of_this_rank(value) for name, value in of_gauges.items()},
            **_merged(gauge.sync_sums() for gauge in self.gauges),
        }

    def _of_this_rank(self, value: float) -> np.ndarray:
        """Returns (ranks,): the sum over ranks has every rank's value at its index."""
        values = np.zeros(self._communicator.size)
        values[self._communicator.rank] = value
        return values

    def sync_fields(self, sums: Sums, step: int, window_s: float) -> dict[str, Any]:
        """Returns fields of the event "step" for the steps since the last sync point, up to step
        `step`. Every rank calls it."""
        steps = max(1, len(self._steps))
        self._epoch_work_s = self._epoch_work_s + sums["rank.work"]
        self._epoch_steps += steps
        fields = {
            "steps": steps,
            "phase_ms": self._phase_ms(sums, steps, window_s),
            **self._slowest(1e3 * sums["rank.work"] / steps),
            **_memory_mb(sums),
            **_merged(gauge.fields(sums, steps) for gauge in self.gauges),
        }
        if LOGGER.isEnabledFor(logging.INFO):
            LOGGER.info(self._line_of_this_rank(step))
        if self.step_times:
            self._emit_step_times(step)
        return {key: _rounded(value) for key, value in fields.items()} | {
            "window_s": round(window_s, 6)
        }

    def _phase_ms(self, sums: Sums, steps: int, window_s: float) -> dict[str, float]:
        """Returns milliseconds of a step by phase, the mean over ranks; "other" is the time outside
        of all phases."""
        phases = {
            phase: 1e3 * sums[f"phase.{phase}"] / steps / self._communicator.size
            for phase in PHASES
            if sums[f"phase.{phase}"]
        }
        return phases | {"other": max(0.0, 1e3 * window_s / steps - sum(phases.values()))}

    def _slowest(self, work_ms: np.ndarray) -> dict[str, Any]:
        """Returns the slowest rank. work_ms: (ranks,). Empty if a rank's work includes waiting for
        other ranks.

        The ranks of a stage are compared with each other, since they do the same work; the field
        work_ms belongs to the slowest rank's stage.
        """
        if not self._learner.waits_only_in_communication:
            return {}
        return slowest(work_ms, self._stages, self._hosts)

    def _emit_step_times(self, last_step: int) -> None:
        """Emits an event for each step since the last sync point, up to step `last_step`. Every
        rank calls it."""
        mine = [[step.get(phase, 0.0) for phase in PHASES] for step in self._steps]
        # (ranks, steps, phases)
        times_ms = 1e3 * self._communicator.allgather(np.array([mine]), "gauges.steps")
        work_ms = times_ms.sum(2) - times_ms[:, :, PHASES.index("communication")]
        for index in range(len(self._steps)):
            means = dict(zip(PHASES, times_ms[:, index].mean(0).tolist(), strict=True))
            fields = {
                "phase_ms": {phase: ms for phase, ms in means.items() if ms},
                **self._slowest(work_ms[:, index]),
            }
            step = last_step - len(self._steps) + index + 1
            self.log.emit(
                "step_times", step, **{key: _rounded(value) for key, value in fields.items()}
            )

    def _line_of_this_rank(self, step: int) -> str:
        steps = max(1, len(self._steps))
        phases = ", ".join(
            f"{phase} {1e3 * seconds / steps:.2f}" for phase, seconds in total(self._steps).items()
        )
        return f"step {step}, ms of each of {steps} steps: {phases}"

    def epoch_fields(self, now: TrainState, val: Sums, seconds: float) -> dict[str, Any]:
        """Returns fields of the event "epoch", `seconds` into the job; `val`: the sums of its
        evaluation. The next epoch begins."""
        steps = max(1, self._epoch_steps)
        of_ranks = (
            {"rank_work_ms": 1e3 * self._epoch_work_s / steps}
            if self._learner.waits_only_in_communication
            else {}
        )
        for gauge in self.gauges:
            gauge.evaluated(val)
            of_ranks |= gauge.epoch_fields(steps)
        self._epoch_work_s = np.zeros(self._communicator.size)
        self._epoch_steps = 0
        fields = energy_fields(now, self.energy_kinds, seconds - now.evaluated_s)
        return fields | {
            name: [round(ms, 3) for ms in of_rank.tolist()] for name, of_rank in of_ranks.items()
        }

    def finish(self, now: TrainState) -> TrainState:
        """Adds the joules since the last reading, and closes the gauges. Every rank calls it, after
        the last sync point."""
        left = self.read_sums()
        now = now.add_energy(
            allreduce_sums(self._communicator, left, "end.joules") if left else left
        )
        for gauge in self.gauges:
            gauge.close(now.progress.step)
        return now


def _memory_mb(sums: Sums) -> dict[str, float]:
    """Returns the largest value of any rank, for each name."""
    peaks = {
        "memory_mb": float(sums["rank.memory"].max()) / 1e6,
        "gpu_memory_mb": float(sums["rank.gpu_memory"].max()) / 1e6,
    }
    return {key: peak for key, peak in peaks.items() if peak}


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _work_s(phases: PhaseTimes) -> float:
    """Returns seconds that this rank was busy, not waiting for other ranks."""
    return sum(seconds for phase, seconds in phases.items() if phase != "communication")


def _rounded(value: Any) -> Any:
    """Rounds to a thousandth, to keep lines of events.jsonl short."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """Returns the peak host memory of this process. Linux's ru_maxrss may include the process that
    started this one, because it survives exec; VmHWM does not."""
    try:
        (kb,) = re.findall(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return 1024 * int(kb)

"""What a rank's steps take beside samples: seconds by phase, memory, energy; brought together where the ranks meet anyway."""

from __future__ import annotations

import logging
import math
import re
import resource
import sys
import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.sums import allreduce_sums
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Log
from hvdtrain.events.rank_log import LOGGER
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.stopwatch import PHASES, PhaseTimes, total
from hvdtrain.train.build import parse_profile_steps
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.train.progress.triggers import energy_fields
from hvdtrain.train.telemetry.energy import PAUSE_S, Energy, measure

SHORT_S = 0.1  # power over less time says little
_STATUS = Path("/proc/self/status")


def telemetry(
    config: Config, provenance: Provenance, rank: tuple[Communicator, Learner], hosts: list[str], log: Log, run: Path
) -> Telemetry:
    """Every rank calls it."""
    communicator, learner = rank
    gpu = learner.gpu()
    energy = measure(communicator, gpu.uuid or None if gpu else None, gpu.why if gpu else "")
    steps, name = parse_profile_steps(config.profile.steps, provenance.where("profile.steps")), f"rank-{communicator.rank:05d}"
    profile = (*steps, run / "profile" / name) if steps else None
    return Telemetry(communicator, learner, energy, hosts, log, config.log.step_times, profile)


@dataclass
class Telemetry:
    """One on each rank. flags() rides on the sums that the ranks add up, as guard.flags() does; read() makes an event's fields of them."""

    communicator: Communicator
    learner: Learner
    energy: Energy
    hosts: list[str]  # of each rank
    log: Log
    each_step: bool = False  # log.step_times
    profile: tuple[int, int, Path] | None = None  # steps done when it begins and when it ends, and this rank's folder
    epoch_work_s: np.ndarray = field(init=False)  # (ranks,): seconds of own work since the last evaluation
    epoch_steps: int = 0
    _laps: list[PhaseTimes] = field(default_factory=list)  # of this rank's steps since the last meeting
    _joules: float = 0.0  # since energy was seen last
    _watts: float = math.nan
    _read_s: float = field(default_factory=time.monotonic)  # when energy was seen last
    _look: bool = False  # all ranks look at their counters at this meeting
    _met_s: float = field(default_factory=time.monotonic)
    _window_s: float = 0.0  # between the last two meetings
    _trace: AbstractContextManager[None] | None = None

    def __post_init__(self) -> None:
        self.epoch_work_s = np.zeros(self.communicator.size)
        self.energy.read(now=True)  # from here on

    def turn(self, step: int) -> None:
        """A step begins after `step` others."""
        if self.profile:
            self._profile(step, *self.profile)
        self.energy.keep_up()
        self.learner.stopwatch.enter("data")

    def _profile(self, step: int, first: int, last: int, folder: Path) -> None:
        try:
            if first <= step < last and self._trace is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._trace = self.learner.profile(folder)
                self._trace.__enter__()
        except OSError as error:
            self._no_profile(error)
        if step >= last:
            self.close(step)

    def close(self, step: int) -> None:
        """Writes a profile that is under way after so many steps; where that fails, the job goes on without."""
        trace, profile, self._trace = self._trace, self.profile, None
        if trace is None or profile is None:
            return
        self.profile = None
        try:
            trace.__exit__(None, None, None)
        except (OSError, RuntimeError) as error:
            self._no_profile(error)
        else:
            self.log.emit("profile", step, files=[str(profile[2])])

    def _no_profile(self, error: Exception) -> None:
        self.profile = None
        warnings.warn(f"no profile: {error}; training goes on without it", stacklevel=2)

    def flags(self) -> Sums:
        """Of this rank since the last time; the host waits for the device here."""
        self._laps, met_s = self.learner.stopwatch.read(), self._met_s
        self._met_s = time.monotonic()
        self._window_s = self._met_s - met_s
        mine = total(self._laps)
        work, host, device = (np.zeros(self.communicator.size) for _ in range(3))
        work[self.communicator.rank] = _work(mine)
        host[self.communicator.rank] = host_memory_bytes()
        gpu = self.learner.gpu()
        device[self.communicator.rank] = gpu.peak_bytes() if gpu else 0
        phases = {f"phase.{phase}": mine.get(phase, 0.0) for phase in PHASES}
        return phases | {"rank.work": work, "rank.memory": host, "rank.gpu_memory": device} | self.joules(self._look)

    def read(self, sums: Sums, step: int, window_s: float) -> dict[str, Any]:
        """Fields of the event "step", of the steps since the last time, the last being the `step`th. Every rank calls it."""
        steps = max(1, len(self._laps))
        self.epoch_work_s, self.epoch_steps = self.epoch_work_s + sums["rank.work"], self.epoch_steps + steps
        phases = {phase: 1e3 * sums[f"phase.{phase}"] / steps / self.communicator.size for phase in PHASES if sums[f"phase.{phase}"]}
        other = 1e3 * window_s / steps - sum(phases.values())
        fields: dict[str, Any] = {"steps": steps, "window_s": window_s, "phase_ms": phases | {"other": max(0.0, other)}}
        fields |= self._stragglers(1e3 * sums["rank.work"] / steps) | self._memory(sums) | self._power(sums)
        if LOGGER.isEnabledFor(logging.INFO):
            LOGGER.info(self._own_words(step))
        if self.each_step:
            self._tell_steps(step)
        return {key: _rounded(value) for key, value in fields.items()} | {"window_s": round(window_s, 6)}

    def joules(self, now: bool) -> Sums:
        """Of this rank's counters since the last look, which all ranks take together; NaN of a kind that is not measured everywhere.

        Rank 0's clock says whether the meeting after this is one: if that is PAUSE_S after the last, should it be as far off as this was.
        """
        seen = self.energy.read(now=True) if now else dict.fromkeys(("joules.gpu", "joules.cpu"), 0.0)
        passed_s = 0.0 if now else time.monotonic() - self._read_s
        due = self.communicator.rank == 0 and passed_s + self._window_s >= PAUSE_S
        return {"joules.look": float(due)} | {
            name: joules if not self.energy.why.get(name.removeprefix("joules.")) else math.nan for name, joules in seen.items()
        }

    @property
    def kinds(self) -> list[str]:
        """Of energy that are measured."""
        return [kind for kind, why in self.energy.why.items() if not why]

    def epoch(self, now: TrainState, val: Sums, seconds: float) -> dict[str, Any]:
        """Fields of the event "epoch", of the sums of its evaluation, `seconds` into the job; the next one begins."""
        self._power(val)
        work = 1e3 * self.epoch_work_s / max(1, self.epoch_steps)
        self.epoch_work_s, self.epoch_steps = np.zeros(self.communicator.size), 0
        apart = {"rank_work_ms": [round(ms, 3) for ms in work.tolist()]} if self.learner.waits_only_in_communication else {}
        return apart | energy_fields(now, self.kinds, seconds - now.evaluated_s)

    def last(self, now: TrainState) -> TrainState:
        """With what was used since the last look. Every rank calls it, after its last meeting."""
        return now.add_energy(allreduce_sums(self.communicator, self.joules(now=True), "end.joules"))

    def _stragglers(self, work_ms: np.ndarray) -> dict[str, Any]:
        slowest = int(work_ms.argmax())
        spread = [float(work_ms.min()), float(np.median(work_ms)), float(work_ms.max())]
        if not self.learner.waits_only_in_communication:  # each rank's work then has its waiting for the slowest in it
            return {}
        return {"work_ms": spread, "slowest_rank": slowest, "slowest_host": self.hosts[slowest]}

    def _memory(self, sums: Sums) -> dict[str, Any]:
        most = {"memory_mb": sums["rank.memory"].max() / 1e6, "gpu_memory_mb": sums["rank.gpu_memory"].max() / 1e6}
        return {key: float(value) for key, value in most.items() if value}

    def _power(self, sums: Sums) -> dict[str, Any]:
        """Since the counters were looked at before; where they were not, that of the last look."""
        self._joules += sum(sums[f"joules.{kind}"] for kind in self.kinds)
        passed_s = (now_s := time.monotonic()) - self._read_s
        if (self._look or "rank.work" not in sums) and passed_s >= SHORT_S:
            self._watts, self._joules, self._read_s = self._joules / passed_s if self.kinds else math.nan, 0.0, now_s
        self._look = sums["joules.look"] > 0
        return {} if math.isnan(self._watts) else {"watts": self._watts}

    def _tell_steps(self, step: int) -> None:
        """An event for each step, of all ranks: (ranks, steps, phases) come together."""
        rows = np.array([[[lap.get(phase, 0.0) for phase in PHASES] for lap in self._laps]])
        everyone = 1e3 * self.communicator.allgather(rows, "gauges.steps")
        work_ms = everyone.sum(2) - everyone[:, :, PHASES.index("communication")]
        for place in range(len(self._laps)):
            means = dict(zip(PHASES, everyone[:, place].mean(0).tolist(), strict=True))
            fields = {"phase_ms": {phase: ms for phase, ms in means.items() if ms}, **self._stragglers(work_ms[:, place])}
            self.log.emit("step_times", step - len(self._laps) + place + 1, **{key: _rounded(value) for key, value in fields.items()})

    def _own_words(self, step: int) -> str:
        steps = max(1, len(self._laps))
        phases = ", ".join(f"{phase} {1e3 * seconds / steps:.2f}" for phase, seconds in total(self._laps).items())
        return f"step {step}, ms of each of {steps} steps: {phases}"


def host_memory_bytes() -> int:
    """The most of this process. Linux's ru_maxrss may be that of the process which started it: it outlives exec."""
    try:
        (kb,) = re.findall(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 1024 * int(kb)


def _work(phases: PhaseTimes) -> float:
    """Seconds that this rank was busy by itself."""
    return sum(seconds for phase, seconds in phases.items() if phase != "communication")


def _rounded(value: Any) -> Any:
    """To a thousandth: lines stay short."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value

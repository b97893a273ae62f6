"""The measurements of each job's hardware: energy, power, and utilization of GPUs."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.events.log import Log
from hvdtrain.extras.energy.counters import find_counters
from hvdtrain.extras.energy.meter import EnergyMeter, summary
from hvdtrain.extras.energy.utilization import Utilization
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.stopwatch import PhaseTimes
from hvdtrain.training.telemetry.gauge import Gauge


class EnergyGauge(Gauge):
    """Measures the energy of the job's hardware, and the utilization of this rank's GPU.

    utilization: None on all ranks if none has a GPU, because they sum the same names.
    """

    def __init__(
        self,
        communicator: Communicator,
        learner: Learner,
        meter: EnergyMeter,
        utilization: Utilization | None = None,
    ) -> None:
        self._communicator = communicator
        self._learner = learner
        self._meter = meter
        self._utilization = utilization
        self.energy_kinds = meter.kinds

    def start_fields(self) -> dict[str, Any]:
        return {"energy": self._meter.reasons}

    def header_lines(self) -> list[str]:
        return [summary(self._meter.reasons)]

    def device_words(self) -> list[str]:
        if self._utilization is None or self._learner.gpu() is None:
            return []
        reason = self._utilization.reason
        return [f"GPU utilization {f'not measured: {reason}' if reason else 'by NVML'}"]

    def keep_up(self) -> None:
        self._meter.keep_up()

    def values(self, phases: PhaseTimes) -> dict[str, float]:
        return {"rank.gpu_percent": self._utilization.percent()} if self._utilization else {}

    def sync_sums(self) -> Sums:
        return self._meter.sync_sums()

    def read_sums(self) -> Sums:
        return self._meter.read_sums()

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        watts = self._meter.update(sums)
        return gpu_percent(sums) | ({} if math.isnan(watts) else {"watts": watts})

    def evaluated(self, sums: Sums) -> None:
        self._meter.update(sums)

    def from_step(self, step: int) -> Gauge:
        return measure(self._communicator, self._learner)


def gpu_percent(sums: Sums) -> dict[str, float]:
    """Returns the mean over the ranks whose GPU can be read."""
    percent = np.asarray(sums.get("rank.gpu_percent", ()), dtype=float)
    known = percent[np.isfinite(percent)]
    return {"gpu_percent": float(known.mean())} if len(known) else {}


def measure(communicator: Communicator, learner: Learner) -> EnergyGauge:
    """Returns the gauge of the ranks of a communicator. A collective."""
    gpu = learner.gpu()
    counters = find_counters(
        communicator, gpu.uuid or None if gpu else None, gpu.why if gpu else ""
    )
    meter = EnergyMeter(counters, communicator.rank, time.monotonic)
    utilization = Utilization(gpu) if "gpu" in meter.reasons else None
    return EnergyGauge(communicator, learner, meter, utilization)


def energy_gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> EnergyGauge:
    return measure(communicator, learner)

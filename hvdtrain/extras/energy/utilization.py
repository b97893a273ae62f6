"""The share of time in which kernels run on this rank's GPU, by NVML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hvdtrain.extras.energy.counters import Nvml, Unmeasured, whole_gpu
from hvdtrain.frameworks.learner import Gpu

# interval of readings from the driver, which computes the share about once a second
READ_EVERY_S = 1.0


class Utilization:
    """The newest reading of one GPU. reason: why it cannot be read; empty if it can."""

    def __init__(
        self, gpu: Gpu | None, nvml: Nvml | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._read: Callable[[], float] | None = None
        self._read_s = -math.inf
        self._percent = math.nan
        self.reason = "the rank computes on a CPU"
        if gpu is not None:
            try:
                driver, handle = whole_gpu(gpu.uuid or None, gpu.why, nvml)
                self._read = lambda: driver.nvmlDeviceGetUtilizationRates(handle).gpu
                self.reason = ""
            except Unmeasured as error:
                self.reason = str(error)

    def percent(self) -> float:
        """Returns the share in percent, over about the last second; NaN if it cannot be read."""
        now_s = self._clock()
        if self._read is not None and now_s - self._read_s >= READ_EVERY_S:
            self._read_s = now_s
            try:
                self._percent = float(self._read())
            except Exception:  # an NVML error: the value is lost, and training continues without it
                self._percent = math.nan
                self._read = None
        return self._percent

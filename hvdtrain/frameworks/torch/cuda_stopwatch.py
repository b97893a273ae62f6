"""How long each phase of a step takes on a GPU, by events in its own stream: the host waits only where they are read."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hvdtrain.frameworks.stopwatch import HostStopwatch, PhaseTimes, Stopwatch, phase_times


class CudaStopwatch:
    """A phase is the GPU's time between two events: "data" is then the time for which it had nothing to do between two steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        if not self._stamps and phase != "data":
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._stamps.append((phase, event))

    def read(self) -> list[PhaseTimes]:
        stamps, self._stamps = self._stamps, []
        for _, event in stamps:  # a hook may have recorded on another stream than the last one
            if not event.query():
                event.synchronize()
        return phase_times([(phase, a.elapsed_time(b) / 1e3) for (phase, a), (_, b) in itertools.pairwise(stamps)])


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch for steps on a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()

"""How long each phase of a step takes on a GPU, by events in its own stream; and a trace of some steps, by torch.profiler."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from hvdtrain.frameworks.stopwatch import HostStopwatch, PhaseTimes, ReplaceableStopwatch, Stopwatch, phase_times


class CudaStopwatch:
    """A phase is the GPU's time between two events: "data" is then the time for which it had nothing to do between two steps.

    The host waits only where they are read.
    """

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


class TracingStopwatch:
    """A stopwatch that also records each phase as a range of the trace."""

    def __init__(self, inner: Stopwatch) -> None:
        self.inner, self._thread = inner, threading.get_ident()
        self._range: Any = None

    def enter(self, phase: str) -> None:
        self.inner.enter(phase)
        if threading.get_ident() != self._thread:  # a hook in backward's own thread: a range ends on the thread where it began
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(f"hvdtrain: {phase}") if phase else None
        if self._range is not None:
            self._range.__enter__()

    def read(self) -> list[PhaseTimes]:
        return self.inner.read()


@contextmanager
def profile(stopwatch: ReplaceableStopwatch, device: torch.device, path: Path) -> Iterator[None]:
    """Traces what is done inside, with the phases of `stopwatch`, into PATH/trace.json.gz.

    The file is for https://ui.perfetto.dev or chrome://tracing. Starting a trace takes a second or two.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    trace = torch.profiler.profile(activities=activities, record_shapes=True)
    with trace, stopwatch.replaced_by(TracingStopwatch(stopwatch.current)):
        try:
            yield
        finally:
            stopwatch.enter("")
    trace.export_chrome_trace(str(path / "trace.json.gz"))

"""A trace of some steps by torch.profiler, with the phases of each step by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from hvdtrain.frameworks.stopwatch import PhaseTimes, ReplaceableStopwatch, Stopwatch


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

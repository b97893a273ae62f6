"""A trace of some steps by torch.profiler, with the phases of each step by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from hvdtrain.frameworks.stopwatch import PhaseTimes, Stopwatch


class Named:
    """A stopwatch whose phases are ranges of the trace too."""

    def __init__(self, inner: Stopwatch) -> None:
        self.inner, self._thread = inner, threading.get_ident()
        self._range: Any = None

    def enter(self, phase: str) -> None:
        self.inner.enter(phase)
        if threading.get_ident() != self._thread:  # of a hook in backward's own thread: a range ends where it began
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(f"hvdtrain: {phase}") if phase else None
        if self._range is not None:
            self._range.__enter__()

    def read(self) -> list[PhaseTimes]:
        return self.inner.read()


@contextmanager
def profile(learner: Any, path: Path) -> Iterator[None]:
    """Writes PATH/trace.json.gz, for https://ui.perfetto.dev or chrome://tracing. Starting it takes a second or two."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (learner.device.type == "cuda")]
    before, learner.stopwatch = learner.stopwatch, Named(learner.stopwatch)
    trace = torch.profiler.profile(activities=activities, record_shapes=True)
    trace.__enter__()
    try:
        yield
    finally:
        learner.stopwatch.enter("")
        learner.stopwatch = before
        trace.__exit__(None, None, None)
    trace.export_chrome_trace(str(path / "trace.json.gz"))

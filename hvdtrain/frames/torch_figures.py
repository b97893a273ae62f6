"""What a torch learner does in a step, in numbers: seconds by phase, floating-point operations, and what the device could do at most."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.state import Batch, Hyper

PRODUCTS = 7


class Stopwatch:
    """`lap` of a learner: it waits for the device at the end of each phase, so phases that would overlap do not."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, defaultdict[str, float](float)
        self._last = time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self._wait()
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        self._wait()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def step_flops(learner: Any, micro: Sequence[Batch], hyper: Hyper) -> int:
    """Of one step on this rank, which is made: products and convolutions, forward and backward, a multiplication and an addition being two.

    What torch.compile fuses is not counted.
    """
    with FlopCounterMode(display=False) as counter:
        learner.step(micro, hyper, 0)
    return int(counter.get_total_flops())


def peak_flops(learner: Any, size: int = 2048) -> float:
    """Operations a second of a square matrix product in the type of the learner's layers: the median of a few, after two to warm up."""
    dtype = learner.precision.layers or learner.dtype
    a, b = (torch.randn(size, size, device=learner.device).to(dtype) for _ in range(2))
    watch, seconds = Stopwatch(learner.device), []
    for _ in range(PRODUCTS + 2):
        watch.start()
        torch.mm(a, b)
        watch.lap("product")
        seconds.append(watch.seconds.pop("product"))
    return 2 * size**3 / sorted(seconds[2:])[PRODUCTS // 2]

"""Measurements of a torch step for bench step: phases that do not overlap, floating-point
operations, and the peak of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.stopwatch import HostStopwatch
from hvdtrain.frameworks.torch.step_costs import FlopCounter

PRODUCTS = 7


def synchronizing_stopwatch(device: torch.device) -> HostStopwatch:
    """Returns a stopwatch that waits for the device at the end of each phase, so that no two phases
    overlap."""
    return HostStopwatch(
        (lambda: torch.accelerator.synchronize(device)) if device.type != "cpu" else None
    )


def step_flops(learner: Any, micro: Sequence[Batch], hyper: Hyper) -> int:
    """Makes one step and returns the operations of its matrix products and convolutions, forward
    and backward; a multiply-add counts as two.

    Every rank calls it. Operations fused by torch.compile are not counted.
    """
    with FlopCounter() as counter:
        learner.step(micro, hyper, 0)
    return counter.flops


def peak_flops(learner: Any, size: int = 2048) -> float:
    """Measures the operations per second of a square matrix product in the dtype of the layers: the
    median of PRODUCTS, after two warm-ups."""
    dtype = learner.forward.precision.layers or learner.dtype
    a, b = (torch.randn(size, size, device=learner.device).to(dtype) for _ in range(2))
    stopwatch = synchronizing_stopwatch(learner.device)
    for _ in range(PRODUCTS + 2):
        stopwatch.enter("data")
        stopwatch.enter("compute")
        torch.mm(a, b)
        stopwatch.enter("")
    seconds = [step["compute"] for step in stopwatch.read()]
    return 2 * size**3 / sorted(seconds[2:])[PRODUCTS // 2]

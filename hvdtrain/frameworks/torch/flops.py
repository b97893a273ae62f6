"""What a torch learner does in a step, in numbers: seconds by phase, floating-point operations, and what the device could do at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.core.arrays import Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.stopwatch import HostStopwatch

PRODUCTS = 7


def patient(device: torch.device) -> HostStopwatch:
    """A stopwatch that waits for the device at the end of each phase, so phases that would overlap do not."""
    return HostStopwatch((lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None)


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
    watch = patient(learner.device)
    for _ in range(PRODUCTS + 2):
        watch.enter("data")
        watch.enter("compute")
        torch.mm(a, b)
        watch.enter("")
    seconds = [step["compute"] for step in watch.read()]
    return 2 * size**3 / sorted(seconds[2:])[PRODUCTS // 2]

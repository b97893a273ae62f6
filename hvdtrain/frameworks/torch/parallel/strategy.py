"""Strategy: how the gradients of the ranks become one, and everything in a step that depends on it; and the strategy of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums, zero_sums

NamedParameters = list[tuple[str, torch.nn.Parameter]]

# (micro-batch on the device, what the sum of its losses is divided by, whether it is the step's last) -> this rank's sums.
# One forward and one backward pass, which adds to p.grad.
OnePass = Callable[[Any, int, bool], Sums]


class Wrapped(NamedTuple):
    """What a strategy puts in the place of a model's forward pass and of its optimizer, or both as they were."""

    forward: torch.nn.Module  # for passes of training alone
    optimizer: torch.optim.Optimizer


class Strategy(Protocol):
    """Makes p.grad the sum over ranks, for every parameter, between the last backward of a step and its update.

    The losses of a step are divided by the global batch before backward, so that sum is the mean over the global batch. A parameter that
    no loss reaches has a gradient of zero, on one rank as on many. Every method is called on every rank, in this order: wrap() once,
    then for each step run(), reduce() and optimizer_step(), and sync() at each sync point.
    """

    summary: str  # for the line that describes the learner: "gradients in 3 overlapped buckets"
    equal_ranks: int  # ranks that have the same p.grad after reduce(): all of them, or 1 where each keeps its own
    waits_in_passes: bool  # forward or backward wait for other ranks, so that the time of a pass is not this rank's own work

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        """Before the optimizer has any state. May be a collective."""

    def run(self, micro: Sequence[Sized], batch: int, one_pass: OnePass) -> Sums:
        """Calls one_pass for each micro-batch, in order, and adds up what it returns. len() of a micro-batch is its samples.

        `batch` is the global batch. Reductions may start in the last pass.
        """

    def reduce(self) -> None:
        """Waits until p.grad is the sum over ranks. A collective."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, from p.grad as it is now. May be a collective: every rank leaves it out, or none."""

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes weights and optimizer state equal on all ranks, where they are not. A collective."""


def run_passes(micro: Sequence[Any], divisor: int, one_pass: OnePass, before_last: Callable[[], None] = lambda: None) -> Sums:
    """The sums of all passes of a step, made one after the other; `before_last` is called just before the last of them."""
    total = zero_sums()
    for number, batch in enumerate(micro, start=1):
        is_last = number == len(micro)
        if is_last:
            before_last()
        sums = one_pass(batch, divisor, is_last)
        total = {name: total[name] + sums[name] for name in total}
    return total


def fill_missing(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Gives a gradient of zero to each parameter that has none."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)


class SingleProcess:
    """One rank: the sum over ranks is its own gradient."""

    summary = "no reduction"
    equal_ranks = 1
    waits_in_passes = False

    def __init__(self, named: NamedParameters) -> None:
        self._parameters = [p for _, p in named]

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, optimizer)

    def run(self, micro: Sequence[Sized], batch: int, one_pass: OnePass) -> Sums:
        return run_passes(micro, batch, one_pass)

    def reduce(self) -> None:
        fill_missing(self._parameters)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def reduction_device(device: torch.device, communicator: Communicator) -> torch.device:
    """Where tensors of a device are reduced: in host memory, unless the engine takes those of a GPU."""
    return device if "device_memory" in communicator.features else torch.device("cpu")

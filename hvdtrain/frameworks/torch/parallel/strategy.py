"""Strategy: how the gradients of the ranks become one, and everything in a step that depends on it; and the strategy of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums, add_sums
from hvdtrain.core.pieces import WHOLE, Cut
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.core.updates import Update

NamedParameters = list[tuple[str, torch.nn.Parameter]]

# (micro-batch on the device, what the sum of its losses is divided by, whether it is the step's last) -> this rank's sums.
# One forward and one backward pass, which adds to p.grad; of a pipeline all passes of a step, with the micro-batches in a list.
OnePass = Callable[[Any, int, bool], Sums]


class Wrapped(NamedTuple):
    """What a strategy puts in the place of a model's forward pass and of its optimizer, or both as they were."""

    forward: torch.nn.Module  # for passes of training alone
    optimizer: torch.optim.Optimizer


class Shard(NamedTuple):
    """The part of a parameter that this rank updates."""

    parameter: torch.nn.Parameter  # what the optimizer takes: the parameter itself, or (n,), elements of its memory; n may be 0
    whole: torch.nn.Parameter  # of the model; where that has a cut of what one process would have, the cut
    start: int  # the first of those elements, in the order of indices
    stop: int  # behind the last
    cut: Cut = WHOLE
    is_mine: bool = True  # no rank before this one has the same elements, of those that have the model together
    is_everywhere: bool = True  # of the whole parameter: every rank has it

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the parameter."""
        return self.parameter is self.whole and self.cut == WHOLE and self.is_everywhere

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter that one process would have."""
        return self.cut.whole_shape(tuple(self.whole.shape))

    def of(self, array: Any) -> Any:
        """(n,), what belongs to these elements of an array of that shape."""
        return self.cut.of(array).reshape(-1)[self.start : self.stop]


def whole_shard(p: torch.nn.Parameter) -> Shard:
    return Shard(p, p, 0, p.numel())


class Strategy(Protocol):
    """Makes p.grad the sum over ranks, for every parameter or this rank's shard of it, between a step's last backward and its update.

    The losses of a step are divided by the weight of the global batch before backward, so that sum is the mean over it. A parameter that
    no loss reaches has a gradient of zero, on one rank as on many. Every method is called on every rank, in this order: wrap() once,
    then for each step run(), reduce() and optimizer_step(), and sync() at each sync point.
    """

    summary: str  # for the line that describes the learner: "gradients in 3 overlapped buckets"
    local_mean: bool  # a rank learns from the mean over its own samples, not over those of all ranks
    waits_in_passes: bool  # forward or backward wait for other ranks, so that the time of a pass is not this rank's own work

    @property
    def equal_ranks(self) -> int:
        """Ranks that have the same p.grad after reduce(): all of them, or 1 where each keeps its own."""

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        """Before the optimizer has any state. May be a collective."""

    def shard(self, p: torch.nn.Parameter) -> Shard:
        """Which part of a trained parameter this rank updates."""

    def part(self, p: torch.nn.Parameter) -> Shard:
        """Which part of any parameter's memory this rank has."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that update different parts: x itself where every rank updates everything. A collective, else."""

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        """Calls one_pass with the divisor for each micro-batch, in order, and adds up what it returns.

        Reductions may start in the last pass.
        """

    def reduce(self) -> None:
        """Waits until p.grad is the sum over ranks. A collective."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, from p.grad as it is now. May be a collective: every rank leaves it out, or none."""

    def weights_changed(self) -> None:
        """The model's weights were loaded: copies of them follow, and what a step that was cut off has left is void."""

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes weights and optimizer state equal on all ranks, where they are not. A collective."""


class Held(NamedTuple):
    """Memory of a strategy's own, between two steps."""

    gradients: list[torch.Tensor]  # where p.grad lies from the reduction to the update
    in_transit: list[torch.Tensor]


@runtime_checkable
class HoldsGradients(Protocol):
    """A strategy that has memory of its own."""

    def held(self) -> Held:
        """For those who count it."""


@runtime_checkable
class DividesAnew(Protocol):
    """A strategy whose parts can become those of other ranks; as Learner has it."""

    def divide_anew(self) -> torch.optim.Optimizer:
        """After ranks were lost: the optimizer of the parts that this rank has now, without state; shard() has them, too."""


@runtime_checkable
class PutsTogether(Protocol):
    """A strategy in which ranks update parts of the weights, and each has all of them."""

    def put_together(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Tensors of the weights' shapes, of which each rank gives its parts: of(parameter of a Shard). A collective."""


@runtime_checkable
class ChangesWithSteps(Protocol):
    """A strategy that is another one in some steps."""

    def begin_step(self, hyper: Hyper) -> None:
        """Before anything else is asked of it in a step. The same on all ranks."""


@runtime_checkable
class SharesSteps(Protocol):
    """A strategy in which not every rank makes every step; as Learner has it."""

    def own_steps(self, steps: Sequence[Progress]) -> Iterable[Progress]: ...
    def read_updates(self) -> list[Update]: ...


def run_passes(micro: Sequence[Any], divisor: int, one_pass: OnePass, before_last: Callable[[], None] = lambda: None) -> Sums:
    """The sums of all passes of a step, made one after the other; `before_last` is called just before the last of them."""
    total: Sums = {}
    for number, batch in enumerate(micro, start=1):
        is_last = number == len(micro)
        if is_last:
            before_last()
        sums = one_pass(batch, divisor, is_last)
        total = add_sums(total, sums)
    return total


def fill_missing(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Gives a gradient of zero to each parameter that has none."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)


class Replicated:
    """A part of a Strategy in which every rank updates everything."""

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return whole_shard(p)

    def part(self, p: torch.nn.Parameter) -> Shard:
        return whole_shard(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def weights_changed(self) -> None:
        pass


class SingleProcess(Replicated):
    """One rank: the sum over ranks is its own gradient."""

    summary = "no reduction"
    local_mean = False
    equal_ranks = 1
    waits_in_passes = False

    def __init__(self, named: NamedParameters) -> None:
        self._parameters = [p for _, p in named]

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, optimizer)

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        return run_passes(micro, divisor, one_pass)

    def reduce(self) -> None:
        fill_missing(self._parameters)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def reduction_device(device: torch.device, communicator: Communicator) -> torch.device:
    """Where tensors of a device are reduced: in host memory, unless the engine takes those of a GPU."""
    return device if "device_memory" in communicator.features else torch.device("cpu")

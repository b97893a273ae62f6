"""Strategy: how ranks reduce gradients, and everything in a step that depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, NamedTuple

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.core.arrays import WHOLE, Cut, elements
from hvdtrain.core.metrics import Sums, add_sums
from hvdtrain.core.progress import GoOn, Hyper, Progress, WorkerUpdate

NamedParameters = list[tuple[str, torch.nn.Parameter]]

# (micro-batch on the device, what the sum of its losses is divided by, whether it is the step's
# last) -> this rank's sums. One forward and one backward pass, which adds to p.grad; of a pipeline
# all passes of a step, with the micro-batches in a list.
OnePass = Callable[[Any, int, bool], Sums]


class Wrapped(NamedTuple):
    """A model's forward pass and its optimizer, after a strategy wrapped them or left them as they
    were."""

    forward: torch.nn.Module  # for passes of training alone
    optimizer: torch.optim.Optimizer


class Shard(NamedTuple):
    """The part of a parameter that this rank updates."""

    # what the optimizer takes: the parameter itself, or (n,), elements of its memory; n may be 0
    parameter: torch.nn.Parameter
    # of the model; where that has a cut of what one process would have, the cut
    whole: torch.nn.Parameter
    start: int  # the first of those elements, in the order of indices
    stop: int  # behind the last
    cut: Cut = WHOLE
    is_mine: bool = (
        True  # no rank before this one has the same elements, of those that have the model together
    )
    is_everywhere: bool = True  # of the whole parameter: every rank has it

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the parameter."""
        return self.parameter is self.whole and self.cut == WHOLE and self.is_everywhere

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter that one process would have."""
        return self.cut.whole_shape(tuple(self.whole.shape))

    def take(self, array: Any) -> Any:
        """Returns (n,), what belongs to these elements of an array of that shape."""
        return elements(array, self.cut, self.start, self.stop)


def whole_shard(p: torch.nn.Parameter) -> Shard:
    return Shard(p, p, 0, p.numel())


class StrategyMemory(NamedTuple):
    """Memory of a strategy's own, between two steps."""

    gradients: list[torch.Tensor]  # where p.grad lies from the reduction to the update
    in_transit: list[torch.Tensor]


class Strategy:
    """Makes p.grad the sum over ranks, for every parameter or this rank's shard of it, between a
    step's last backward and its update.

    The losses of a step are divided by the weight of the global batch before backward, so that sum
    is the mean over it. A parameter that no loss reaches has a gradient of zero, on one rank as on
    many. Every method is called on every rank, in this order: wrap() once, then for each step
    begin_step(), run(), reduce() and optimizer_step(), and sync() at each sync point.

    The base class is the strategy of one process, whose gradient is the sum over ranks.
    """

    # for the line that describes the learner: "gradients in 3 overlapped buckets"
    summary: str = "no reduction"
    local_mean: bool = (
        False  # a rank learns from the mean over its own samples, not over those of all ranks
    )
    calls_model: bool = True  # a rank may call the model by itself, outside of a step
    # of the ranks that read different samples each calls the model as often as all others
    gathers_in_passes: bool = False
    # forward or backward wait for other ranks, so that the time of a pass is not this rank's own
    # work
    waits_in_passes: bool = False

    def __init__(self, named: NamedParameters) -> None:
        """named: the trained parameters."""
        self._trained = [p for _, p in named]

    @property
    def equal_ranks(self) -> int:
        """Ranks that have the same p.grad after reduce(): all of them, or 1 where each keeps its
        own."""
        return 1

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        """Wraps the forward pass and the optimizer, before the optimizer has any state. May be a
        collective."""
        return Wrapped(forward, optimizer)

    def shard(self, p: torch.nn.Parameter) -> Shard:
        """Returns the part of a trained parameter that this rank updates."""
        return whole_shard(p)

    def part(self, p: torch.nn.Parameter) -> Shard:
        """Returns the part of any parameter that this rank has."""
        return whole_shard(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks that update different parts, a collective; x itself if every
        rank updates everything."""
        return x

    def own_steps(self, steps: Sequence[Progress]) -> Iterable[Progress]:
        """Returns the steps that this rank makes: see Learner."""
        return steps

    def read_updates(self) -> list[WorkerUpdate]:
        """Returns the updates of asynchronous steps since the last call: see Learner."""
        return []

    def begin_step(self, hyper: Hyper) -> None:
        """Called first in a step, with the same arguments on all ranks."""

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        """Calls one_pass with the divisor for each micro-batch, in order, and adds up what it
        returns.

        Reductions may start in the last pass.
        """
        return run_passes(micro, divisor, one_pass)

    def reduce(self) -> None:
        """Waits until p.grad is the sum over ranks. A collective."""
        fill_missing(self._trained)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's step from the current p.grad. May be a collective: either every
        rank skips it, or none does."""
        optimizer.step()

    def weights_changed(self) -> None:
        """Called after weights were loaded: updates copies of them, and discards the rest of an
        interrupted step."""

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes weights and optimizer state equal on all ranks, if they are not. A collective."""

    def held(self) -> StrategyMemory:
        """Returns the memory that the strategy itself holds, for those who count it."""
        return StrategyMemory([], [])

    def put_together(
        self,
        of: Callable[[torch.nn.Parameter], torch.Tensor],
        trained: Sequence[torch.nn.Parameter],
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Assembles whole tensors of the trained parameters' shapes; each rank gives its parts,
        of(parameter of a Shard). A collective."""
        return {p: of(p) for p in trained}

    def class_name(self, model: torch.nn.Module) -> str:
        """Returns the name of the user's class: wrap() may have made the model another one."""
        return type(model).__name__

    def divide_anew(self, mesh: Mesh) -> torch.optim.Optimizer:
        """After ranks were lost: the optimizer of the parts that this rank has now, without state;
        shard() has them, too."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided among other ranks")

    def how_to_go_on(self, former_rank: int, kept: int) -> GoOn | None:
        """Learner.how_to_go_on()."""
        return None

    def go_on(self, how: GoOn, kept: int, mesh: Mesh) -> None:
        """Learner.go_on(), with the groups of the ranks that are left."""
        raise NotImplementedError(f"{type(self).__name__} goes back to a sync point")


class Around(Strategy):
    """A strategy that delegates to another one, except for the methods that it overrides.

    Not passed on: put_together(), divide_anew(), how_to_go_on() and go_on(), since optim.ema and
    guard.lost=shrink are refused beside what wraps; own_steps() and read_updates(), since nothing
    of this kind wraps the strategies of asynchronous steps.
    """

    def __init__(self, within: Strategy) -> None:
        self._within = within

    @property
    def equal_ranks(self) -> int:
        return self._within.equal_ranks

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return self._within.wrap(forward, optimizer)

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._within.shard(p)

    def part(self, p: torch.nn.Parameter) -> Shard:
        return self._within.part(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self._within.total(x)

    def begin_step(self, hyper: Hyper) -> None:
        self._within.begin_step(hyper)

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        return self._within.run(micro, divisor, one_pass)

    def reduce(self) -> None:
        self._within.reduce()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._within.optimizer_step(optimizer)

    def weights_changed(self) -> None:
        self._within.weights_changed()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        self._within.sync(optimizer)

    def held(self) -> StrategyMemory:
        return self._within.held()

    def class_name(self, model: torch.nn.Module) -> str:
        return self._within.class_name(model)


def run_passes(
    micro: Sequence[Any],
    divisor: int,
    one_pass: OnePass,
    before_last: Callable[[], None] = lambda: None,
) -> Sums:
    """Runs all passes of a step and returns their sums; `before_last` is called just before the
    last pass."""
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


def reduction_device(device: torch.device, communicator: Communicator) -> torch.device:
    """Returns the device on which tensors of a device are reduced: the host, unless the engine
    takes GPU memory."""
    return device if "device_memory" in communicator.features else torch.device("cpu")


def runs_ahead(device: torch.device, communicator: Communicator) -> bool:
    """Whether the host does not wait for collectives of the device's tensors: on a GPU with
    torch.distributed's NCCL. Tensors of the CPU are reduced by Gloo, for which it waits, on a host
    with GPUs too; Horovod's threads agree on each collective first."""
    return device.type != "cpu" and communicator.features >= {"nccl", "ddp"}


def nccl_ranks(device: torch.device, communicator: Communicator) -> int:
    """How many ranks reduce tensors on this device by NCCL; 0: they use no NCCL."""
    return communicator.size if device.type != "cpu" and "nccl" in communicator.features else 0

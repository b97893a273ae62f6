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

# (micro-batch on the device, divisor of the sum of its losses, whether it is the step's last) ->
# this rank's sums. Runs one forward and one backward pass, which adds to p.grad; in a pipeline all
# passes of a step, with the micro-batches in a list.
OnePass = Callable[[Any, float, bool], Sums]


class Wrapped(NamedTuple):
    """A model's forward pass and its optimizer, after a strategy wrapped them or left them as they
    were."""

    forward: torch.nn.Module  # only for training passes
    optimizer: torch.optim.Optimizer


class Shard(NamedTuple):
    """The part of a parameter that this rank updates."""

    # what the optimizer updates: the parameter itself, or (n,) elements of its memory; n may be 0
    parameter: torch.nn.Parameter
    # the model's parameter; with tensor parallelism this rank's cut of the parameter that one
    # process would have
    whole: torch.nn.Parameter
    start: int  # the first of those elements, in the order of indices
    stop: int  # behind the last
    cut: Cut = WHOLE
    is_mine: bool = (
        True  # True: among the ranks that share the model, no lower rank has the same elements
    )
    is_everywhere: bool = True  # every rank has the whole parameter

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the parameter."""
        return self.parameter is self.whole and self.cut == WHOLE and self.is_everywhere

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the parameter would have on one process."""
        return self.cut.whole_shape(tuple(self.whole.shape))

    def take(self, array: Any) -> Any:
        """Returns (n,), these elements of an array with the parameter's shape."""
        return elements(array, self.cut, self.start, self.stop)


def whole_shard(p: torch.nn.Parameter) -> Shard:
    return Shard(p, p, 0, p.numel())


class StrategyTensor(NamedTuple):
    """A tensor of a strategy that a resume needs, on the device of its parameter."""

    tensor: torch.Tensor
    # 0: equal on all ranks. Otherwise each of so many ranks has its own. Only their sum matters, so
    # another number of ranks divides the sum equally
    ranks: int = 0
    rank: int = 0  # among them

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint: (ranks, ...) if ranks have their own."""
        return (*([self.ranks] if self.ranks else ()), *self.tensor.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether load() takes an array of this shape."""
        return shape[bool(self.ranks) :] == tuple(self.tensor.shape) and len(shape) == len(
            self.shape
        )

    def load(self, array: Any) -> None:
        """Loads this rank's tensor from an array of a checkpoint, maybe of other ranks."""
        size = self.tensor.numel()
        is_same = not self.ranks or array.shape[0] == self.ranks
        rows = [self.rank] if is_same else range(array.shape[0])
        total = sum(elements(array, WHOLE, row * size, (row + 1) * size) for row in rows)
        found = total if is_same else total / self.ranks
        self.tensor.copy_(torch.from_numpy(found).view(self.tensor.shape))


class StrategyMemory(NamedTuple):
    """The memory that a strategy itself keeps between two steps."""

    gradients: list[torch.Tensor]  # hold p.grad from the reduction to the update
    in_transit: list[torch.Tensor]


class Strategy:
    """Makes p.grad the sum over ranks, for each parameter or this rank's shard of it, between a
    step's last backward pass and its update.

    The losses of a step are divided by the weight of the global batch before backward, so this sum
    is the mean over the global batch. A parameter that no loss reaches has a zero gradient on any
    number of ranks. Every method is called on every rank, in this order: wrap() once; for each step
    begin_step(), run(), reduce() and optimizer_step(); sync() at each sync point.

    The base class is the strategy for one process, whose gradient already is the sum over ranks.
    """

    # for the line that describes the learner, for example "gradients in 3 overlapped buckets"
    summary: str = "no reduction"
    local_mean: bool = (
        # False: a rank learns from the mean over its own samples, not over all ranks' samples
        False
    )
    calls_model: bool = True  # a rank may call the model by itself, outside of a step
    # all ranks that read different samples must call the model equally often
    gathers_in_passes: bool = False
    # forward or backward wait for other ranks, so a pass takes longer than this rank's own work
    waits_in_passes: bool = False

    def __init__(self, named: NamedParameters) -> None:
        """named: the trained parameters."""
        self._trained = [p for _, p in named]

    @property
    def equal_ranks(self) -> int:
        """The number of ranks with the same p.grad after reduce(): all ranks, or 1 if each rank
        keeps its own."""
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
        """Returns the steps that this rank makes (see Learner)."""
        return steps

    def read_updates(self) -> list[WorkerUpdate]:
        """Returns the updates of asynchronous steps since the last call: see Learner."""
        return []

    def begin_step(self, hyper: Hyper) -> None:
        """Begins a step: called before all other methods, with the same arguments on all ranks."""

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        """Calls one_pass with the divisor for each micro-batch, in order, and returns the sum of
        the results.

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
        """Called after weights were loaded: updates copies of the weights and discards the rest of
        an interrupted step."""

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes weights and optimizer state equal on all ranks, if they are not. A collective."""

    def tensors(self) -> dict[str, StrategyTensor]:
        """Returns the tensors that a resume needs besides weights and optimizer state, at a sync
        point. Their names, the same on all ranks, are a parameter's and their own, with an @,
        which no name of optimizer state has: fc.weight@residual."""
        return {}

    def held(self) -> StrategyMemory:
        """Returns the memory that the strategy itself holds."""
        return StrategyMemory([], [])

    def put_together(
        self,
        of: Callable[[torch.nn.Parameter], torch.Tensor],
        trained: Sequence[torch.nn.Parameter],
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Returns whole tensors with the trained parameters' shapes. Each rank contributes its
        parts, of(parameter of a Shard). A collective."""
        return {p: of(p) for p in trained}

    def class_name(self, model: torch.nn.Module) -> str:
        """Returns the name of the user's class: wrap() may have changed the model's class."""
        return type(model).__name__

    def divide_anew(self, mesh: Mesh) -> torch.optim.Optimizer:
        """Returns, after ranks were lost, the optimizer for the parts that this rank has now,
        without state. shard() returns these parts too."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided among other ranks")

    def how_to_go_on(self, former_rank: int, kept: int) -> GoOn | None:
        """Learner.how_to_go_on()."""
        return None

    def go_on(self, how: GoOn, kept: int, mesh: Mesh) -> None:
        """Learner.go_on(), with the groups of the remaining ranks."""
        raise NotImplementedError(f"{type(self).__name__} goes back to a sync point")


class Around(Strategy):
    """A strategy that delegates to another one, except for the methods that it overrides.

    It does not delegate put_together(), divide_anew(), how_to_go_on() and go_on(), because
    optim.ema and guard.lost=shrink are rejected together with such strategies. Nor does it delegate
    own_steps() and read_updates(), because it never wraps a strategy with asynchronous steps.
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

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        return self._within.run(micro, divisor, one_pass)

    def reduce(self) -> None:
        self._within.reduce()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._within.optimizer_step(optimizer)

    def weights_changed(self) -> None:
        self._within.weights_changed()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        self._within.sync(optimizer)

    def tensors(self) -> dict[str, StrategyTensor]:
        return self._within.tensors()

    def held(self) -> StrategyMemory:
        return self._within.held()

    def class_name(self, model: torch.nn.Module) -> str:
        return self._within.class_name(model)


def run_passes(
    micro: Sequence[Any],
    divisor: float,
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
    """Gives a zero gradient to each parameter that has no gradient."""
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
    """Returns the number of ranks that reduce tensors on this device with NCCL; 0: NCCL is not
    used."""
    return communicator.size if device.type != "cpu" and "nccl" in communicator.features else 0

"""comm.reduce=distributed_optimizer: hvd.DistributedOptimizer, and which optimizers Horovod can wrap."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Sized
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, OnePass, Strategy, Wrapped, fill_missing, run_passes


class HorovodOptimizer(Strategy):
    """hvd.DistributedOptimizer: its hooks start the allreduces, its synchronize() waits for them."""

    summary = "gradients by hvd.DistributedOptimizer"

    def __init__(self, named: NamedParameters, communicator: Communicator) -> None:
        self._named, self._passes = named, 1
        self._communicator = communicator

    @property
    def equal_ranks(self) -> int:
        return self._communicator.size

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self._optimizer = wrap_optimizer(optimizer, self._named)
        return Wrapped(forward, self._optimizer)

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        if len(micro) != self._passes:
            self._optimizer.set_backward_passes_per_step(len(micro))
            self._passes = len(micro)
        return run_passes(micro, divisor, one_pass)

    def reduce(self) -> None:
        fill_missing([p for _, p in self._named])  # Horovod does so itself, but for a single rank
        self._optimizer.synchronize()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with self._optimizer.skip_synchronize():
            optimizer.step()


def wrap_optimizer(optimizer: torch.optim.Optimizer, named: NamedParameters) -> Any:
    """hvd.DistributedOptimizer with op=Sum: the loss is already divided by the global batch. Wrap before any state exists."""
    import horovod.torch as hvd

    # The constructor is called again, on the groups alone, and state from before is dropped: ours is made after it. A class that makes
    # state in its constructor (Adagrad) makes the same again only where that takes no option: fits_horovod() refuses options.
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, op=hvd.Sum)


def fits_horovod(optimizer: torch.optim.Optimizer, named: NamedParameters) -> str:
    """Why hvd.DistributedOptimizer cannot take this optimizer with these parameters; empty where it can."""
    required = [p.name for p in list(inspect.signature(type(optimizer)).parameters.values())[1:] if _is_required(p)]
    if required:  # it constructs the optimizer again from its parameter groups alone
        return f"Horovod cannot construct {type(optimizer).__name__} again without its {', '.join(required)}"
    construction = optimizer.param_groups[0].get("construction")
    if construction is not None and construction.options:  # the constructor may act on them, or keep them outside of the groups
        return f"Horovod would construct {type(optimizer).__name__} again without its {', '.join(construction.options)}"
    for name, p in named:
        if not p.is_contiguous():
            return f"Horovod cannot reduce channels_last or otherwise strided tensors ({name})"
    return ""


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)

"""comm.reduce=distributed_optimizer: hvd.DistributedOptimizer, and which optimizers Horovod can wrap."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hvdtrain.frameworks.torch.parallel.strategy import Named, fill_missing


class HorovodOptimizer:
    """hvd.DistributedOptimizer: its hooks start the allreduces, its synchronize() waits for them."""

    words = "gradients by hvd.DistributedOptimizer"
    wrapped = None
    local_mean = False

    def __init__(self, optimizer: Any, named: Named) -> None:
        self._optimizer, self._passes = optimizer, 1
        self._parameters = [p for _, p in named]

    def begin(self, passes: int) -> None:
        if passes != self._passes:
            self._optimizer.set_backward_passes_per_step(passes)
            self._passes = passes

    def last_pass(self) -> None:
        pass

    def finish(self) -> None:
        fill_missing(self._parameters)  # Horovod does so itself, but for a single rank
        self._optimizer.synchronize()

    def apply(self, optimizer: Any) -> None:
        with self._optimizer.skip_synchronize():
            optimizer.step()


def fits_horovod(optimizer: torch.optim.Optimizer, named: Named) -> str:
    """Why hvd.DistributedOptimizer cannot take this optimizer with these parameters; empty where it can."""
    required = [p.name for p in list(inspect.signature(type(optimizer)).parameters.values())[1:] if _is_required(p)]
    if required:  # it makes the optimizer anew from its parameter groups alone
        return f"Horovod cannot make {type(optimizer).__name__} anew without its {', '.join(required)}"
    made = optimizer.param_groups[0].get("made")
    if made is not None and made.options:  # the constructor may act on them, or keep them outside of the groups
        return f"Horovod would make {type(optimizer).__name__} anew without its {', '.join(made.options)}"
    for name, p in named:
        if not p.is_contiguous():
            return f"Horovod cannot reduce channels_last or otherwise strided tensors ({name})"
    return ""


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def wrap_optimizer(optimizer: torch.optim.Optimizer, named: Named) -> Any:
    """hvd.DistributedOptimizer with op=Sum: the loss is already divided by the global batch. Wrap before any state is there."""
    import horovod.torch as hvd

    # The constructor is called again, on the groups alone, and state from before is dropped: our slots are made after it. A class that
    # makes state in its constructor (Adagrad) makes the same again only where that takes no option: fits_horovod() tells of options.
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, op=hvd.Sum)

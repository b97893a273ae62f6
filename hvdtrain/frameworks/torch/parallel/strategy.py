"""How the gradients of the ranks meet: what a Reducer is, one rank alone, and hvd.DistributedOptimizer."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch

from hvdtrain.comm.communicator import Engine

Named = list[tuple[str, torch.nn.Parameter]]


class Reducer(Protocol):
    """Makes p.grad the sum over ranks, for every parameter, between the last backward of a step and its update.

    A parameter that no loss reached counts as a gradient of zero, on one rank as on many.
    """

    words: str  # for the line that tells the user
    own_mean: bool  # what it takes is each rank's mean over its own samples, not its share of the mean over the global batch

    @property
    def wrapped(self) -> torch.nn.Module | None:
        """What a forward pass of training goes through, where that is not Forward itself."""

    def begin(self, passes: int) -> None:
        """A step of `passes` backward passes begins."""

    def last_pass(self) -> None:
        """The next backward is the step's last: gradients may travel as they appear."""

    def finish(self) -> None:
        """The last backward is over."""

    def apply(self, optimizer: Any) -> None:
        """The optimizer's step, with the gradients as they are now."""


class Forward(torch.nn.Module):
    """A model's logits, (n, classes) for n images; of none a scalar 0 whose gradients are 0, without statistics of nothing.

    With `sync` the statistics are those of all ranks, so one without images calls the model too.
    """

    def __init__(self, model: torch.nn.Module, sync: bool) -> None:
        super().__init__()
        self.model, self._sync = model, sync

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) or self._sync:
            return self.model(x)
        return torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0.0


def fill_missing(parameters: list[torch.nn.Parameter]) -> None:
    """Gives a gradient of zero to each parameter that has none."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)


class Alone:
    """One rank: there is nobody to meet."""

    words = "no reduction"
    wrapped = None
    own_mean = False

    def __init__(self, named: Named) -> None:
        self._parameters = [p for _, p in named]

    def begin(self, passes: int) -> None:
        pass

    def last_pass(self) -> None:
        pass

    def finish(self) -> None:
        fill_missing(self._parameters)

    def apply(self, optimizer: Any) -> None:
        optimizer.step()


class InOptimizer:
    """hvd.DistributedOptimizer: its hooks start the allreduces, its synchronize() waits for them."""

    words = "gradients by hvd.DistributedOptimizer"
    wrapped = None
    own_mean = False

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


def meeting_place(device: torch.device, engine: Engine) -> torch.device:
    """Where tensors of a device meet: the mpi engine takes host memory only, so those of a GPU travel through it."""
    return torch.device("cpu") if engine.name == "mpi" else device


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

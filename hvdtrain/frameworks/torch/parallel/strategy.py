"""Strategy: how the gradients of the ranks are reduced; and the strategy of a single process."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hvdtrain.comm.communicator import Communicator

Named = list[tuple[str, torch.nn.Parameter]]


class Strategy(Protocol):
    """Makes p.grad the sum over ranks, for every parameter, between the last backward of a step and its update.

    A parameter that no loss reached counts as a gradient of zero, on one rank as on many.
    """

    words: str  # for the line that tells the user
    local_mean: bool  # what it takes is each rank's mean over its own samples, not its share of the mean over the global batch

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


class SingleProcess:
    """One rank: there is nobody to meet."""

    words = "no reduction"
    wrapped = None
    local_mean = False

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


def reduction_device(device: torch.device, communicator: Communicator) -> torch.device:
    """Where tensors of a device are reduced: in host memory, unless the engine takes those of a GPU."""
    return device if "device_memory" in communicator.features else torch.device("cpu")

"""speed.precision of a script's own model: the type of its weights, and autocast around each call of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.config.section import DEFAULT
from hvdtrain.frameworks.torch.forward import in_type
from hvdtrain.frameworks.torch.precision import LossScale, Precision, pick_precision


def precision_of(config: Config, model: torch.nn.Module, device: torch.device, communicator: Communicator) -> Precision:
    """What speed.precision asks for; where the script does not set it, the model stays as it is. Every rank calls it."""
    if is_asked(config):
        return pick_precision(config, device, communicator)
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    return Precision(dtype, None, str(dtype).removeprefix("torch."))


def is_asked(config: Config) -> bool:
    """Whether the script sets speed.precision."""
    return config.origin("speed.precision") != DEFAULT


def give_type(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Makes weights, buffers and what the optimizer's constructor has made of that type; parameters stay the same objects."""
    model.to(dtype)
    for state in optimizer.state.values():
        state |= {key: t.to(dtype) for key, t in state.items() if key != "step" and torch.is_tensor(t) and t.is_floating_point()}


def compute_in(model: torch.nn.Module, precision: Precision, device: torch.device) -> None:
    """From here on each call of the model is under autocast, and its outputs are of the weights' type."""
    if precision.layers is None:
        return
    entered: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        entered.append(precision.autocast(device))
        entered[-1].__enter__()

    def leave(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return None if outputs is None else in_type(outputs, precision.weights)  # None: the call has failed

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


class ScaleOfLoss(LossScale):
    """The loss scale of speed.precision=fp16 in a script's own loop, which may look at p.grad before the step: it is divided out behind
    the backward pass.
    """

    def divide_out(self, parameters: list[torch.nn.Parameter]) -> None:
        """LossScale.unscale_(), at once."""
        super().unscale_(parameters)

    def unscale_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Nothing: divide_out() was called."""

"""The optimizer of the torch frame, and its slots as arrays."""

from __future__ import annotations

import torch

from hvdtrain.errors import UserError
from hvdtrain.optim.rule import Rule
from hvdtrain.optim.sgd import Sgd
from hvdtrain.state import Hyper


def make_optimizer(rule: Rule, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer that computes what `rule` says; tests compare the two."""
    if not isinstance(rule, Sgd):
        raise UserError(f"frame=torch has no optimizer for {type(rule).__name__} yet", "optim.name", "optim.name=sgd")
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def set_hyper(optimizer: torch.optim.Optimizer, hyper: Hyper) -> None:
    """Puts the numbers of one step into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"], group["momentum"], group["weight_decay"] = hyper.lr, hyper.momentum, hyper.weight_decay


def fill_slots(optimizer: torch.optim.Optimizer) -> None:
    """Makes the slots that the first step would make, as zeros, so that they can be saved, sent and loaded at any time.

    A zero momentum buffer gives the same first step as none: m 0 + g = g.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def slots(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> list[torch.Tensor]:
    """The live slots of one parameter, in the order of Rule.init."""
    return [optimizer.state[p]["momentum_buffer"]]

"""Numbers that are not finite: told to every rank, found in the mean gradient, kept out of sums; nothing here waits for the device."""

from __future__ import annotations

import math

import torch

from hvdtrain.core.metrics import Sums


def slope(loss: torch.Tensor) -> torch.Tensor:
    """What to multiply the loss with: 1, but NaN where it is not finite; the reduction brings that to every rank.

    As a factor, not as the argument of backward(), which imports sympy to look at its shape: half a second. A clamp between the last
    parameter and the loss would keep NaN from the parameters.
    """
    return loss.detach() * 0.0 + 1.0  # torch.where(..., 1.0, nan) would copy both numbers to the device, and wait


def any_nonfinite(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Whether any number of p.grad is NaN or infinite: () bool. Of each number by itself: a norm of finite ones may overflow."""
    gradients = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    some = [g for g in gradients if g.numel()]  # nothing has no largest number
    if not some:
        return torch.zeros((), dtype=torch.bool, device=parameters[0].device)
    if some[0].device.type == "cpu":
        extremes = [extreme for g in some for extreme in torch.aminmax(g)]  # a fifth to a twentieth of the time of _foreach_norm
    else:
        extremes = list(torch._foreach_norm(some, math.inf))  # few kernels for all; a NaN among them gives NaN
    return ~torch.stack(extremes).isfinite().all()


def unless(bad: torch.Tensor, sums: Sums) -> Sums:
    """The sums as device scalars, all 0 where `bad`."""
    return {name: ((~bad).double() * value).masked_fill(bad, 0.0) for name, value in sums.items()}

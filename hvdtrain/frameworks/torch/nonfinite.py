"""NaN and infinity: passed on to every rank, found in the mean gradient, kept out of sums. Nothing here waits for the device."""

from __future__ import annotations

import math

import torch

from hvdtrain.core.metrics import Sums


def one_or_nan(loss: torch.Tensor) -> torch.Tensor:
    """A factor for the loss: 1, but NaN where it is not finite. The gradients become NaN, and the reduction brings that to every rank.

    It is a factor, not the argument of backward(), which imports sympy to look at its shape: half a second. A clamp between the last
    parameter and the loss would keep NaN from the parameters.
    """
    return loss.detach() * 0.0 + 1.0  # torch.where(..., 1.0, nan) would copy both numbers to the device, and wait


def any_nonfinite(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Whether any number of p.grad is NaN or infinite: () bool. Of each number by itself: a norm of finite ones may overflow."""
    gradients = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    nonempty = [g for g in gradients if g.numel()]  # aminmax of no numbers is an error
    if not nonempty:
        return torch.zeros((), dtype=torch.bool, device=parameters[0].device)
    if nonempty[0].device.type == "cpu":
        extremes = [extreme for g in nonempty for extreme in torch.aminmax(g)]  # a fifth to a twentieth of the time of _foreach_norm
    else:
        extremes = list(torch._foreach_norm(nonempty, math.inf))  # few kernels for all; a NaN among them gives NaN
    return ~torch.stack(extremes).isfinite().all()


def zero_where(bad: torch.Tensor, sums: Sums) -> Sums:
    """The sums as device scalars, all 0 where `bad`, () bool, is true."""
    return {name: ((~bad).double() * value).masked_fill(bad, 0.0) for name, value in sums.items()}

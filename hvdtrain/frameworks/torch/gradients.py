"""What happens to gradients between backward and update: the noise scale is measured, they are clipped, noise is added."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.torch.parallel.strategy import Shard
from hvdtrain.optim.clipping import clip
from hvdtrain.recipe.noise_scale import noise_scale_sums

Total = Callable[[torch.Tensor], torch.Tensor]  # Strategy.total


class NoMeter:
    """Measures nothing."""

    def last_pass(self) -> None:
        pass

    def read(self, hyper: Hyper, count: int, shards: Sequence[Shard], total: Total) -> Sums:
        return {}


class Meter:
    """The squared norms from which recipe/noise_scale.py computes the gradient noise scale, without another pass over the data.

    Construct it before the strategy: its hooks then see a rank's own gradient before the strategy's reduce it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], world: Communicator) -> None:
        self._world = world
        self._is_last_pass = False
        self._local_square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)  # of this rank's own gradient
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._add)

    def last_pass(self) -> None:
        """The gradients after the next backward are those of all the rank's samples of the step."""
        self._is_last_pass = True
        self._local_square.zero_()

    def read(self, hyper: Hyper, count: int, shards: Sequence[Shard], total: Total) -> Sums:
        """This rank's part of NOISE_SCALE_KEYS, as device scalars, of `count` samples; the shards have the global batch's mean by now."""
        self._is_last_pass = False
        square = total(sum((_square(shard.parameter) for shard in shards), torch.zeros(())))
        global_square = square.to(self._local_square.device)  # with shard.offload it is in host memory
        return noise_scale_sums(self._local_square, global_square, count, hyper.batch, self._world.size)

    def _add(self, p: torch.Tensor) -> None:
        if self._is_last_pass:
            self._local_square += _square(p)


def _square(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad.square().sum(dtype=torch.float64)


def clip_(shards: Sequence[Shard], norm: float | None, value: float | None, total: Total) -> None:
    """optim/clipping.py's clip() of all gradients; None: not."""
    if norm is not None or value is not None:
        parameters = [shard.parameter for shard in shards]
        for p, g in zip(parameters, clip([p.grad for p in parameters], norm, value, torch, total), strict=True):
            p.grad = g


def add_noise_(shards: Sequence[Shard], variance: float, seed: int) -> None:
    """Adds normal noise of this variance to each number of the gradients; of a parameter the same on every rank, since the seed is."""
    if variance:
        generator: Any = torch.Generator(shards[0].parameter.device).manual_seed(seed & (2**63 - 1))
        for shard in shards:
            g = shard.parameter.grad
            assert g is not None
            noise = torch.empty_like(g) if shard.is_whole else torch.empty(shard.shape, dtype=g.dtype, device=g.device)
            noise.normal_(0.0, variance**0.5, generator=generator)
            g += noise if shard.is_whole else shard.of(noise).view(g.shape)


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
    """The sums as device scalars, all 0 where `bad`, () bool, is true: it may be of offloaded gradients, in host memory."""
    found = {name: (~bad).double() * value for name, value in sums.items()}
    return {name: value.masked_fill(bad.to(value.device), 0.0) for name, value in found.items()}

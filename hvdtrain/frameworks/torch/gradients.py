"""What happens to gradients between backward and update: the noise scale is measured, they are clipped, noise is added."""

from __future__ import annotations

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
        global_square = total(sum((_square(shard.parameter) for shard in shards), torch.zeros(())))
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

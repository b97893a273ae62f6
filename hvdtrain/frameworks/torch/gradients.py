"""What happens to gradients between backward and update: the noise scale is measured, they are clipped, noise is added."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.optim.clipping import clip
from hvdtrain.recipe.noise_scale import noise_scale_sums


class NoMeter:
    """Measures nothing."""

    def last_pass(self) -> None:
        pass

    def read(self, hyper: Hyper, count: int) -> Sums:
        return {}


class Meter:
    """The squared norms from which recipe/noise_scale.py computes the gradient noise scale, without another pass over the data.

    Construct it before the strategy: its hooks then see a rank's own gradient before the strategy's reduce it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], ranks: int) -> None:
        self._parameters, self._ranks = parameters, ranks
        self._is_last_pass = False
        self._local_square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)  # of this rank's own gradient
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._add)

    def last_pass(self) -> None:
        """The gradients after the next backward are those of all the rank's samples of the step."""
        self._is_last_pass = True
        self._local_square.zero_()

    def read(self, hyper: Hyper, count: int) -> Sums:
        """This rank's part of NOISE_SCALE_KEYS, as device scalars; p.grad is the global batch's mean by now, `count` the rank's samples."""
        self._is_last_pass = False
        global_square = sum(_square(p) for p in self._parameters)
        return noise_scale_sums(self._local_square, global_square, count, hyper.batch, self._ranks)

    def _add(self, p: torch.Tensor) -> None:
        if self._is_last_pass:
            self._local_square += _square(p)


def _square(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad.square().sum(dtype=torch.float64)


def clip_(parameters: list[torch.nn.Parameter], norm: float | None, value: float | None) -> None:
    """optim/clipping.py's clip() of every p.grad; None: not."""
    if norm is not None or value is not None:
        for p, g in zip(parameters, clip([p.grad for p in parameters], norm, value, torch), strict=True):
            p.grad = g


def add_noise_(parameters: list[torch.nn.Parameter], variance: float, seed: int) -> None:
    """Adds normal noise of this variance to each number of p.grad; the same on every rank, since the seed is."""
    if variance:
        generator: Any = torch.Generator(parameters[0].device).manual_seed(seed & (2**63 - 1))
        for p in parameters:
            assert p.grad is not None
            p.grad += torch.empty_like(p.grad).normal_(0.0, variance**0.5, generator=generator)

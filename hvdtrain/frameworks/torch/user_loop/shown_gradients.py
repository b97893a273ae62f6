"""The gradients that a script sees between ctx.backward() and the optimizer's step; sharded ones
are hidden."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.strategy import Strategy
from hvdtrain.frameworks.torch.user_loop.prepared import GivenScale, ScaleOfLoss


class ShownGradients:
    """The gradients of a model's parameters after all ranks have reduced them."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        updated: list[torch.nn.Parameter],
        strategy: Strategy,
        scale: GivenScale | ScaleOfLoss,
        *,
        is_sharded: bool,
    ) -> None:
        """updated: the tensors that the optimizer updates, one per parameter. is_sharded: some of
        them are parts."""
        self._parameters = parameters
        self._updated = updated
        self._strategy = strategy
        self._scale = scale
        self._is_sharded = is_sharded
        # gradients of parts, from backward to the step
        self._out_of_sight: dict[torch.nn.Parameter, torch.Tensor | None] = {}

    def show(self, factor: float = 1.0) -> None:
        """Multiplies the reduced gradients, and hides parts."""
        gradients = [p.grad for p in self._updated if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        if isinstance(self._scale, ScaleOfLoss):
            self._scale.divide_out(self._updated)
        if self._is_sharded:
            for p in self._parameters:
                if self._strategy.shard(p).parameter is p:
                    self._out_of_sight[p] = p.grad
                p.grad = placeholder(p, Elsewhere)

    def bring_back(self) -> None:
        """Makes the hidden parts p.grad again, for the step."""
        for p, gradient in self._out_of_sight.items():
            p.grad = gradient
        self._out_of_sight = {}

    def clear(self) -> None:
        for p in self._parameters:
            p.grad = None
        self._out_of_sight = {}


class Elsewhere(torch.Tensor):
    """A placeholder with a parameter's shape and dtype, but the memory of one number."""

    _what = (
        "with shard.stage or parallel.*, each rank has only a part of the gradients, and "
        "p.grad is not available"
    )
    _fix = (
        "optim.clip_norm=1 in hvdtrain.init() clips by the norm of all gradients; without "
        "shard.stage and parallel.*, p.grad is the mean over all ranks"
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise UserError(cls._what, "p.grad after ctx.backward()", cls._fix)


def placeholder(p: torch.nn.Parameter, kind: type[Elsewhere]) -> torch.Tensor:
    """Returns the placeholder for the gradient of `p`."""
    return torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).as_subclass(kind)

"""AdamW: Adam with decoupled weight decay, which is not scaled by the running means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.adam import adapted_gradient, check_moments, moments
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class AdamW:
    """p = (1 - lr d) p - lr u, u = adapted_gradient(g) (Loshchilov, Hutter 2017, arXiv:1711.05101,
    algorithm 2).

    The paper's decay is eta_t d, with a separate schedule eta_t. Here it is lr d, as in
    torch.optim.AdamW and optax.adamw.
    """

    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return moments(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        u = adapted_gradient(g, state, h, self.beta2, self.eps, ops)
        return ops.axpy(
            -h.lr * u.factor, u.direction, ops.scale(1 - h.lr * h.weight_decay, P)
        ), u.state


def build(*, beta2: float = 0.999, eps: float = 1e-8) -> Rule:
    """Returns the rule of optim.name=adamw; optim.momentum is its beta1, and optim.weight_decay is
    multiplied by the rate.

    beta2: decay of the running mean of squares
    eps: added to the root of the mean of squares
    """
    check_moments(beta2, eps)
    return AdamW(beta2, eps)

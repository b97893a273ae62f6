"""LAMB: Adam whose step is scaled, layer by layer, to the norm of the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.adam import adapted, check_moments, moments
from hvdtrain.optim.lars import moving, ratio_or_one
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class Lamb:
    """u = adapted(g) + d p, p = p - lr (|p| / |u|) u, the ratio 1 where a norm is 0.

    Source: You et al. 2019, arXiv:1904.00962, algorithm 2 with phi the identity.
    """

    beta2: float = 0.999
    eps: float = 1e-6
    adapt: bool = True
    momentum: float = 0.9

    def without_trust_ratio(self) -> Rule:
        return replace(self, adapt=False)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return moments(p, ops)

    def update(self, g: Array, optimizer_state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops) -> tuple[Array, tuple[Any, ...]]:
        factor, u, optimizer_state = adapted(g, optimizer_state, h, (self.beta2, self.eps), ops)
        u = ops.axpy(h.weight_decay, P, ops.scale(factor, u))
        if not self.adapt:
            return ops.axpy(-h.lr, u, P), optimizer_state
        weights, step = ops.norm(P), ops.norm(u)
        return ops.axpy(-h.lr * ratio_or_one(weights, step, moving(weights, step), ops), u, P), optimizer_state


def build(*, beta2: float = 0.999, eps: float = 1e-6) -> Rule:
    """The rule of optim.name=lamb; optim.momentum is its beta1.

    beta2: how much of the running mean of squares stays at each step
    eps: added to the root of the mean of squares
    """
    check_moments(beta2, eps)
    return Lamb(beta2, eps)

"""LAMB: Adam with each layer's step scaled by the norm of its weights divided by the norm of the
step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.adam import adapted_gradient, check_moments, moments
from hvdtrain.optim.lars import both_positive, ratio_or_one
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class Lamb:
    """u = adapted_gradient(g) + d p, p = p - lr (|p| / |u|) u; the ratio is 1 if a norm is 0.

    Source: You et al. 2019, arXiv:1904.00962, algorithm 2 with phi the identity.
    """

    beta2: float = 0.999
    eps: float = 1e-6
    adapt: bool = True
    momentum: float = 0.9

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return replace(self, adapt=not excluded)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return moments(p, ops)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        adam = adapted_gradient(g, state, h, self.beta2, self.eps, ops)
        u = ops.axpy(h.weight_decay, P, ops.scale(adam.factor, adam.direction))
        if not self.adapt:
            return ops.axpy(-h.lr, u, P), adam.state
        weight_norm = ops.norm(P)
        step_norm = ops.norm(u)
        trust_ratio = ops.trusted(
            ratio_or_one(weight_norm, step_norm, both_positive(weight_norm, step_norm), ops)
        )
        return ops.axpy(-h.lr * trust_ratio, u, P), adam.state


def build(*, beta2: float = 0.999, eps: float = 1e-6) -> Rule:
    """Returns the rule of optim.name=lamb; optim.momentum is its beta1.

    beta2: decay of the running mean of squares
    eps: added to the root of the mean of squares
    """
    check_moments(beta2, eps)
    return Lamb(beta2, eps)

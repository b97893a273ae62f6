"""AdamW: Adam whose weights decay beside the gradient's step, not through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.adam import adapted, check_moments, moments
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class AdamW:
    """p = (1 - lr d) p - lr u, u = adapted(g) (Loshchilov, Hutter 2017, arXiv:1711.05101, algorithm 2).

    The paper's decay is eta_t d, with a schedule eta_t beside the rate; here it is lr d, as in torch.optim.AdamW and optax.adamw.
    """

    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9

    def without_trust_ratio(self) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return moments(p, ops)

    def update(self, g: Array, optimizer_state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops) -> tuple[Array, tuple[Any, ...]]:
        factor, u, optimizer_state = adapted(g, optimizer_state, h, (self.beta2, self.eps), ops)
        return ops.axpy(-h.lr * factor, u, ops.scale(1 - h.lr * h.weight_decay, P)), optimizer_state


def build(*, beta2: float = 0.999, eps: float = 1e-8) -> Rule:
    """The rule of optim.name=adamw; optim.momentum is its beta1, and optim.weight_decay is multiplied by the rate.

    beta2: how much of the running mean of squares stays at each step
    eps: added to the root of the mean of squares
    """
    check_moments(beta2, eps)
    return AdamW(beta2, eps)

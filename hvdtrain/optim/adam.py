"""Adam: each number's step is scaled by running means of its gradient and of the gradient's square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class Adam:
    """p = p - lr u, u = adapted(g + d p) (Kingma, Ba 2014, arXiv:1412.6980, algorithm 1; the decay as torch.optim.Adam adds it)."""

    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9

    def without_trust_ratio(self) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return moments(p, ops)

    def update(self, g: Array, optimizer_state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops) -> tuple[Array, tuple[Any, ...]]:
        decayed = ops.axpy(h.weight_decay, P, ops.copy(g))
        factor, u, optimizer_state = adapted(decayed, optimizer_state, h, (self.beta2, self.eps), ops)
        return ops.axpy(-h.lr * factor, u, P), optimizer_state


def moments(p: Array, ops: Ops) -> tuple[Any, ...]:
    """The slots of adapted(): running means of the gradient and of its square."""
    return ops.zeros_like(p), ops.zeros_like(p)


def adapted(
    g: Array, optimizer_state: tuple[Any, ...], h: Hyper, constants: tuple[float, float], ops: Ops
) -> tuple[Any, Array, tuple[Any, ...]]:
    """(factor, u, new slots); `factor u`, u in new memory, is the mean of gradients over the root of the mean of their squares.

    With m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g g, corrected for their start at 0 by c1 = 1 - b1^t and c2 = 1 - b2^t:
    (m / c1) / (sqrt(v / c2) + eps) = (sqrt(c2) / c1) m / (sqrt(v) + eps sqrt(c2)). `constants` are (b2, eps).
    t counts the job's steps, as in timm; torch.optim.Adam counts each parameter's own, so the two part where one gets its first
    gradient late. In hvdtrain none does: a parameter that no loss reached has a gradient of zero.
    """
    beta2, eps = constants
    t = h.step + 1
    root = (1 - beta2**t) ** 0.5
    m = ops.axpy(1 - h.momentum, g, ops.scale(h.momentum, optimizer_state[0]))
    v = ops.addcmul(1 - beta2, g, g, ops.scale(beta2, optimizer_state[1]))
    return root / (1 - h.momentum**t), ops.over_root(m, v, eps * root), (m, v)


def check_moments(beta2: float, eps: float) -> None:
    """A UserError for a beta2 or eps with which no mean of squares can be divided by."""
    if not 0 <= beta2 < 1:
        what = f"a beta2 of {beta2} makes no running mean"
        raise UserError(what, "optim.beta2", "give 0 or more and less than 1, as in optim.beta2=0.999")
    if not 0 <= eps < math.inf:
        raise UserError(f"an eps of {eps} cannot guard a division", "optim.eps", "give 0 or more, as in optim.eps=1e-8")


def build(*, beta2: float = 0.999, eps: float = 1e-8) -> Rule:
    """The rule of optim.name=adam; optim.momentum is its beta1.

    beta2: how much of the running mean of squares stays at each step
    eps: added to the root of the mean of squares
    """
    check_moments(beta2, eps)
    return Adam(beta2, eps)

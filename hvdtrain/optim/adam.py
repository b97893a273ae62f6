"""Adam: the step is the running mean of the gradient, divided by the root of the running mean of
its square, elementwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class Adam:
    """p = p - lr u, u = adapted_gradient(g + d p) (Kingma, Ba 2014, arXiv:1412.6980, algorithm 1;
    the decay as in torch.optim.Adam)."""

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
        decayed = ops.axpy(h.weight_decay, P, ops.copy(g))
        u = adapted_gradient(decayed, state, h, self.beta2, self.eps, ops)
        return ops.axpy(-h.lr * u.factor, u.direction, P), u.state


def moments(p: Array, ops: Ops) -> tuple[Any, ...]:
    """Returns the initial state of adapted_gradient(): running means of the gradient and of its
    square."""
    return ops.zeros_like(p), ops.zeros_like(p)


class AdaptedGradient(NamedTuple):
    """Adam's step, `factor` times `direction`, and the new state."""

    factor: Any  # bias correction, because the means start at 0
    direction: Array  # in new memory
    state: tuple[Any, ...]


def adapted_gradient(
    g: Array, state: tuple[Any, ...], h: Hyper, beta2: float, eps: float, ops: Ops
) -> AdaptedGradient:
    """Computes the running mean of gradients over the root of the running mean of their squares.

    With m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g g, corrected for their start at 0 by c1 = 1
    - b1^t and c2 = 1 - b2^t: (m / c1) / (sqrt(v / c2) + eps) = (sqrt(c2) / c1) m / (sqrt(v) + eps
    sqrt(c2)). t counts the steps of the job, as in timm. torch.optim.Adam counts the steps of each
    parameter, which differs for a parameter that gets its first gradient late. In hvdtrain that
    cannot happen, because a parameter that the loss does not depend on has a gradient of zero.
    """
    t = h.step + 1
    root = (1 - beta2**t) ** 0.5
    m = ops.axpy(1 - h.momentum, g, ops.scale(h.momentum, state[0]))
    v = ops.addcmul(1 - beta2, g, g, ops.scale(beta2, state[1]))
    return AdaptedGradient(root / (1 - h.momentum**t), ops.divide_by_sqrt(m, v, eps * root), (m, v))


def check_moments(beta2: float, eps: float, key: str = "optim.beta2") -> None:
    """Raises UserError for a beta2 outside [0, 1) or an invalid eps."""
    if not 0 <= beta2 < 1:
        what = f"a beta2 of {beta2} does not define a running mean"
        raise UserError(what, key, f"give 0 or more and less than 1, as in {key}=0.999")
    if not 0 <= eps < math.inf:
        raise UserError(
            f"eps={eps} is negative or not finite",
            "optim.eps",
            "give 0 or more, as in optim.eps=1e-8",
        )


def build(*, beta2: float = 0.999, eps: float = 1e-8) -> Rule:
    """Returns the rule of optim.name=adam; optim.momentum is its beta1.

    beta2: decay of the running mean of squares
    eps: added to the root of the mean of squares
    """
    check_moments(beta2, eps)
    return Adam(beta2, eps)

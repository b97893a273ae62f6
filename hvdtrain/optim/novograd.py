"""NovoGrad: the gradient of each layer is divided by the root of a running mean of its squared
norm, before the momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.adam import check_moments
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class NovoGrad:
    """v = b2 v + (1 - b2) |g|^2, m = b1 m + g / (sqrt(v) + eps) + d p, p = p - lr m; v is one
    number for each layer, initially |g|^2.

    (Ginsburg et al. 2019, arXiv:1905.11286, algorithm 1.) A deviation, as in NVIDIA's code and
    timm's copy, covered by a test: v is set to |g|^2 as long as it is 0. So zero gradients at the
    beginning do not count as the first gradient.
    """

    beta2: float = 0.98
    eps: float = 1e-8
    momentum: float = 0.95

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return ops.zeros_like(p), ops.zero(p)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        norm = ops.norm(g)
        square = norm * norm
        v = ops.where(state[1] > 0, self.beta2 * state[1] + (1 - self.beta2) * square, square)
        # if v is 0, g is 0, too; avoids dividing by an eps of 0
        factor = 1.0 / ops.where(v > 0, ops.sqrt(v) + self.eps, 1.0)
        m = ops.axpy(h.weight_decay, P, ops.axpy(factor, g, ops.scale(h.momentum, state[0])))
        return ops.axpy(-h.lr, m, P), (m, v)


def build(*, beta2: float = 0.98, eps: float = 1e-8) -> Rule:
    """Returns the rule of optim.name=novograd; optim.momentum is its beta1, by default 0.95.

    beta2: decay of the running mean of a layer's squared gradient norm
    eps: added to the root of that mean
    """
    check_moments(beta2, eps)
    return NovoGrad(beta2, eps)

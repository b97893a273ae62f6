"""LARC: LARS whose trust ratio can lower the learning rate of a layer but not raise it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.lars import both_positive, check_ratio, ratio_or_one
from hvdtrain.optim.rule import Array, Ops, Rule


class _Factors(NamedTuple):
    """Factors of the gradient and of the weights; the momentum accumulates the sum of both."""

    gradient: Any
    decay: Any


@dataclass(frozen=True)
class Larc:
    """a = trust |p| / (|g| + d |p| + eps), in mode=clip then min(a / lr, 1); v = m v + a (g + d p),
    p = p - lr v.

    Source: NVIDIA Apex, apex/parallel/LARC.py, around torch.optim.SGD with momentum. If |p| or |g|
    is 0, the gradient is not scaled, as in Apex: v = m v + g, without decay. timm's
    Lars(trust_clip=True) decays and scales by min(1 / lr, 1) instead; a test covers both.
    """

    mode: Literal["clip", "scale"] = "clip"
    trust: float = 0.02
    eps: float = 1e-8
    adapt: bool = True
    momentum: float = 0.9

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return replace(self, adapt=not excluded)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return (ops.zeros_like(p),)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        factors = self._factors(g, P, h, ops)
        v = ops.axpy(
            factors.decay, P, ops.axpy(factors.gradient, g, ops.scale(h.momentum, state[0]))
        )
        return ops.axpy(-h.lr, v, P), (v,)

    def _factors(self, g: Array, p: Array, h: Hyper, ops: Ops) -> _Factors:
        if not self.adapt:
            return _Factors(1.0, h.weight_decay)
        weight_norm = ops.norm(p)
        gradient_norm = ops.norm(g)
        scaled = both_positive(weight_norm, gradient_norm)
        a = ratio_or_one(
            self.trust * weight_norm,
            gradient_norm + h.weight_decay * weight_norm + self.eps,
            scaled,
            ops,
        )
        if self.mode == "clip":
            # min(a / lr, 1), defined for lr = 0 too
            a = ops.where(scaled, a / ops.where(a > h.lr, a, h.lr), 1.0)
        return _Factors(ops.trusted(a), ops.where(scaled, a * h.weight_decay, 0.0))


def build(
    *, mode: Literal["clip", "scale"] = "clip", trust: float = 0.02, eps: float = 1e-8
) -> Rule:
    """Returns the rule of optim.name=larc.

    mode: clip: a layer's rate is at most the learning rate; scale: it is the learning rate times
        the ratio, as in LARS
    trust: the share of its norm that a layer may move by in one step
    eps: added under the ratio
    """
    check_ratio(trust, eps)
    return Larc(mode, trust, eps)

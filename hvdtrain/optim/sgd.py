"""Stochastic gradient descent with momentum, as in torch.optim.SGD: the learning rate is outside
the momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.core.progress import Hyper
from hvdtrain.optim.rule import Array, Ops, Rule


@dataclass(frozen=True)
class Sgd:
    """v = m v + g + d p, p = p - lr v; Nesterov: p = p - lr (g + d p + m v) (Sutskever et al. 2013,
    as torch.optim.SGD, dampening 0)."""

    nesterov: bool = False
    momentum: float = 0.9

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return self

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return (ops.zeros_like(p),)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        v = ops.axpy(h.weight_decay, P, ops.axpy(1.0, g, ops.scale(h.momentum, state[0])))
        if self.nesterov:
            step = ops.axpy(h.momentum, v, ops.axpy(h.weight_decay, P, ops.copy(g)))
            return ops.axpy(-h.lr, step, P), (v,)
        return ops.axpy(-h.lr, v, P), (v,)


def build(*, nesterov: bool = False) -> Rule:
    """Returns the rule of optim.name=sgd.

    nesterov: true: look ahead along the momentum (Nesterov)
    """
    return Sgd(nesterov)

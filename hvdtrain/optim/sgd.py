"""Stochastic gradient descent with momentum, as torch.optim.SGD does it: the learning rate stays outside the momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.optim.rule import Array, Rule
from hvdtrain.state import Hyper


@dataclass(frozen=True)
class Sgd:
    """v = m v + g + d p, p = p - lr v (Sutskever et al. 2013, in the form of torch.optim.SGD, dampening 0)."""

    def init(self, p: Array, xp: Any) -> tuple[Array, ...]:
        return (xp.zeros_like(p),)

    def update(self, g: Array, slots: tuple[Array, ...], p: Array, h: Hyper, xp: Any) -> tuple[Array, tuple[Array, ...]]:
        velocity = h.momentum * slots[0] + g + h.weight_decay * p
        return -h.lr * velocity, (velocity,)


def build() -> Rule:
    """The rule of optim.name=sgd; it has no options of its own."""
    return Sgd()

"""Clipping of gradients before an update, by value and by the norm over all parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.optim.rule import Array


def clip(
    gradients: Sequence[Array],
    max_norm: float | None,
    max_value: float | None,
    xp: Any,
    total: Callable[[Array], Array] = lambda x: x,
) -> list[Array]:
    """Returns the clipped gradients of all parameters; nothing is changed in place. xp: numpy,
    jax.numpy or torch. total: sums over ranks, if gradients are sharded.

    Each number is clipped to [-max_value, max_value]; then all are scaled by min(1, max_norm /
    norm), where norm is the Euclidean norm over all parameters together (Pascanu, Mikolov, Bengio
    2013, arXiv:1211.5063, algorithm 1).
    """
    clipped = (
        list(gradients)
        if max_value is None
        else [xp.clip(g, -max_value, max_value) for g in gradients]
    )
    if max_norm is None:
        return clipped
    norm = xp.sqrt(total(sum((g * g).sum() for g in clipped)))
    factor = max_norm / xp.clip(norm, max_norm, None)
    return [g * factor for g in clipped]

"""Gradient clipping: the mean gradient is cut by value, then by its norm over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Array = Any


def clip(gradients: Sequence[Array], norm: float | None, value: float | None, xp: Any) -> list[Array]:
    """The gradients of all parameters, cut; xp is numpy, jax.numpy or torch. Nothing is changed in place.

    `value`: each number is cut to [-value, value]. `norm`: then all are scaled by min(1, norm / length), where length is the Euclidean
    norm over all parameters together (Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, algorithm 1).
    """
    cut = list(gradients) if value is None else [xp.clip(g, -value, value) for g in gradients]
    if norm is None:
        return cut
    length = xp.sqrt(sum((g * g).sum() for g in cut))
    share = norm / xp.clip(length, norm, None)
    return [g * share for g in cut]

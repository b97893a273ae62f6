"""Activation checkpointing in JAX: blocks whose values the backward pass computes again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax

from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import Block


def with_recompute(apply: Callable[..., Any], name: str, which: Literal["none", "all"] | int, where: str) -> Callable[..., Any]:
    """The function of a model whose blocks recompute: all, or the N-th, 2 N-th, ...

    The function calls each block as wrap(number, block)(parameters, x), where `wrap` is its own parameter. Raises UserError where it has
    none.
    """
    if which == "none":
        return apply
    if "wrap" not in inspect.signature(apply).parameters:
        what = f"model.recompute={which} computes blocks again; the function of model.name={name} has no parameter `wrap` for them"
        raise UserError(what, where, "model.recompute=none, or a model that has blocks: mlp, convnet")
    every = 1 if which == "all" else which
    return functools.partial(apply, wrap=functools.partial(_wrap, every))


def _wrap(every: int, number: int, block: Block) -> Block:
    return jax.checkpoint(block) if (number + 1) % every == 0 else block

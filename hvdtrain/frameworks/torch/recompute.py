"""Activation checkpointing: blocks that keep their inputs alone, and compute the rest again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.norm.copied_buffers import copied_buffers


def recompute_blocks(model: nn.Module, which: Literal["none", "all"] | int, where: str) -> None:
    """Makes blocks of the model's `blocks` recompute: all, or the N-th, 2 N-th, ... Names of parameters and buffers stay as they are.

    Dropout has the same mask again, and buffers change once (Chen et al. 2016, arXiv:1604.06174). Raises UserError without `blocks`.
    """
    if which == "none":
        return
    blocks = list(getattr(model, "blocks", ()))
    if not all(isinstance(block, nn.Module) for block in blocks) or not blocks:
        what = f"model.recompute={which} computes blocks again; {type(model).__name__} has no attribute `blocks` with its modules"
        raise UserError(what, where, "model.recompute=none, or a model that has blocks: gpt, wide_resnet, resnet18 ...")
    every = 1 if which == "all" else which
    for block in blocks[every - 1 :: every]:
        block.forward = functools.partial(_recomputed, block, block.forward)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=functools.partial(_contexts, block), **kwargs)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first computation and the second one run in."""
    return contextlib.nullcontext(), copied_buffers(block)

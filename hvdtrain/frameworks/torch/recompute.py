"""model.recompute: the backward pass recomputes activations of blocks instead of storing them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.buffers import copied_buffers


def recompute_blocks(model: nn.Module, which: Literal["none", "all"] | int, where: str) -> None:
    """Makes the model's `blocks` recompute activations: all of them, or the N-th, 2 N-th, ... Names
    of parameters and buffers do not change.

    Dropout uses the same mask again, and buffers are updated once (Chen et al. 2016,
    arXiv:1604.06174). Raises UserError without `blocks`.
    """
    if which == "none":
        return
    blocks = list(getattr(model, "blocks", ()))
    if not all(isinstance(block, nn.Module) for block in blocks) or not blocks:
        what = (
            f"model.recompute={which} recomputes blocks, but {type(model).__name__} has no "
            "attribute `blocks`"
        )
        raise UserError(
            what,
            where,
            "model.recompute=none, or a model that has blocks: gpt, wide_resnet, resnet18 ...",
        )
    every = 1 if which == "all" else which
    for block in blocks[every - 1 :: every]:
        block.forward = functools.partial(_recomputed, block, block.forward)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=functools.partial(_contexts, block),
        **kwargs,
    )


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the first and the second computation."""
    return contextlib.nullcontext(), copied_buffers(block)

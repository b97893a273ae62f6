"""What p.grad is with shard.stage: each use of it is an error that says where the gradients are, where clipping would do nothing."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hvdtrain.errors import UserError


class Elsewhere(torch.Tensor):
    """Has a parameter's shape and type, and one number of memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        what = "with shard.stage each rank has a part of the gradients, and p.grad has none"
        fix = (
            "optim.clip_norm=1 in hvdtrain.init() clips by the norm of all; or shard.stage=0, with which p.grad is the mean over all ranks"
        )
        raise UserError(what, "p.grad after ctx.backward()", fix)


def elsewhere(p: torch.nn.Parameter) -> torch.Tensor:
    """In the place of the gradient of `p`."""
    return torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).as_subclass(Elsewhere)

"""LoopPasses: forward and backward of a batch in a custom loop, whose losses the script
computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.torch.strategy import OnePass

Found = tuple[torch.Tensor, float]  # the script's loss of a part of its batch, and its weight


class LoopPasses:
    """The passes of a whole model; subclasses for partitioned models override them."""

    calls_model = True  # a call of `forward` is one of the model, on this rank

    def __init__(self, forward: torch.nn.Module) -> None:
        """forward: the module that the script gets instead of its model."""
        self.forward = forward

    def check_backward(self, where: str) -> None:
        """Raises UserError if backward is not possible from a loss of the script."""

    def one_pass(
        self,
        loss_of: Callable[[Any], Found],
        weighted: Callable[[Any, Found], torch.Tensor],
        ended: Callable[[bool], None],
    ) -> OnePass:
        """Returns the function that Strategy.run() calls with each part of the batch. Backward
        starts from weighted(part, loss_of(part)). ended: called after a pass, with whether it was
        the last."""

        def one_pass(part: Any, _: float, is_last: bool) -> Sums:
            weighted(part, loss_of(part)).backward()
            ended(is_last)
            return {}

        return one_pass

    def over_stages(
        self, total: torch.Tensor, weight: float, *, is_counted: bool
    ) -> tuple[torch.Tensor, float, bool]:
        """Returns the sum of losses, its weight, and whether the script counted it, from the rank
        that computed them. A collective if that is another rank."""
        return total, weight, is_counted

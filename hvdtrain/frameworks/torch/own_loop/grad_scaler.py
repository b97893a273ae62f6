"""torch.amp.GradScaler with the optimizer of ctx.prepare(): steps that all ranks leave out alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvdtrain.errors import UserError

MOST = 30  # overflows in a row: from 2^16 the scale has come to 2^-14, and it was no overflow


class Scaled(NamedTuple):
    """What GradScaler.step() gives an optimizer that says _step_supports_amp_scaling."""

    found_inf: torch.Tensor  # above 0 where a gradient is not finite
    scale: torch.Tensor | None  # of the gradients; None after GradScaler.unscale_()


class Overflows:
    """Overflows in a row, in which the scale is halved. All ranks have the same gradients, so their scalers find the same."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def unscale(self, scaled: Scaled | None, parameters: list[torch.nn.Parameter], bad: torch.Tensor, is_sharded: bool) -> bool:
        """Divides every p.grad by the scale; whether the step is left out, and does not count as one with bad numbers.

        The host waits for the device here, in each step of a scaler. Raises UserError where this rank has only parts of the gradients.
        """
        if scaled is None:
            return False
        if is_sharded:
            what = "a GradScaler sees this rank's part of the gradients alone: ranks would scale by different numbers"
            raise UserError(
                what, "scaler.step(optimizer)", "shard.stage=0; or bfloat16, which needs no scaler: torch.autocast(..., torch.bfloat16)"
            )
        if scaled.scale is not None:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scaled.scale.reciprocal())
        self._in_a_row = self._in_a_row + 1 if bool(bad | (scaled.found_inf > 0)) else 0
        return 0 < self._in_a_row <= MOST

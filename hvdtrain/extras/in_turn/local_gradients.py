"""Gradients of this rank's samples, hidden from the script until its optimizer's step reduces
them."""

from __future__ import annotations

import torch

from hvdtrain.frameworks.torch.user_loop.shown_gradients import Elsewhere, placeholder


class NotReduced(Elsewhere):
    """A placeholder for a gradient of this rank's samples."""

    _what = "p.grad is not the mean over all ranks yet: the optimizer's step reduces it"
    _fix = (
        "optimizer.synchronize() before code that reads p.grad, such as clip_grad_norm_() or "
        "scaler.step(optimizer); optimizer.zero_grad() to clear it"
    )


class LocalGradients:
    """The gradients of this rank's samples, hidden from the script until they are reduced."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._hidden: dict[torch.nn.Parameter, torch.Tensor] = {}

    @property
    def are_there(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p in self._parameters)

    @property
    def are_of_others(self) -> bool:
        """Whether another backward pass than those of the context has made gradients."""
        return any(
            p.grad is not None and not isinstance(p.grad, NotReduced) for p in self._parameters
        )

    def hide(self) -> None:
        for p in self._parameters:
            if p.grad is not None:
                self._hidden[p] = p.grad
                p.grad = placeholder(p, NotReduced)

    def bring_back(self) -> None:
        """Makes them p.grad again, except those that the script has cleared with the model's
        zero_grad()."""
        for p, gradient in self._hidden.items():
            if isinstance(p.grad, NotReduced):
                p.grad = gradient
        self._hidden = {}

    def forget(self) -> None:
        self._hidden = {}

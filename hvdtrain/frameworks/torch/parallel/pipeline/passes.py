"""The passes of one micro-batch through one stage, backward at once or in two parts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # torch's own zero-bubble schedules' split

from hvdtrain.frameworks.torch.parallel.pipeline.stages import Stage


class _Alias(torch.autograd.Function):
    """An alias of memory: neither a leaf nor a view of one, which autograd lets no unit change in place, as nn.ReLU(inplace=True) does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Passes:
    """Between its forward and its last backward pass; its memory is that of the activations."""

    def __init__(self, stage: Stage, x: torch.Tensor, is_first: bool) -> None:
        """x: (n, ...) the inputs of the model, whose gradient nobody takes, or what the stage before gave."""
        self._x = x.detach().requires_grad_(torch.is_grad_enabled() and not is_first)
        self.outputs: Any = stage(_Alias.apply(self._x))  # what backward() begins with; the loss takes its place in the last stage
        self._parameters = [p for p in stage.parameters() if p.requires_grad]
        self._groups: list[dict[str, Any]] = []  # torch's: of parameters, with the gradients that reach them

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Adds to p.grad; `gradient` is that of the outputs, None for a loss. Returns that of x."""
        if self.outputs.requires_grad:
            torch.autograd.backward(self.outputs, gradient)
        return self._gradient_of_x()

    def input_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """That of x alone, for which the stage before waits."""
        if self.outputs.requires_grad:
            gradients = None if gradient is None else [gradient]
            _, self._groups = stage_backward_input([self.outputs], gradients, [self._x], iter(self._parameters))
        return self._gradient_of_x()

    def weight_gradient(self) -> None:
        """The rest of backward(): adds to p.grad."""
        stage_backward_weight(iter(self._parameters), self._groups)

    def _gradient_of_x(self) -> torch.Tensor:
        """Zeros where nothing depends on it."""
        self.outputs = None
        return torch.zeros_like(self._x) if self._x.grad is None else self._x.grad

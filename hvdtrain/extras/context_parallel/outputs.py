"""Outputs of a model at a rank's positions, and their loss."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hvdtrain.extras.context_parallel.link import ContextLink
from hvdtrain.extras.context_parallel.positions import PositionsOfRanks
from hvdtrain.frameworks.torch.forward import InParts
from hvdtrain.tasks.torch import CutLogits


class SplitOutputs(InParts, CutLogits, Protocol):
    """Outputs of a model whose last layer is divided, too: a rank has a part of the vocabulary."""

    def to(self, dtype: torch.dtype) -> SplitOutputs: ...


class OutputsOfPositions(NamedTuple):
    """The outputs at this rank's positions. A NamedTuple: torch finds the tensor in it."""

    outputs: torch.Tensor | SplitOutputs  # (n, own positions, ...)
    link: ContextLink
    positions: PositionsOfRanks

    @property
    def local(self) -> torch.Tensor:
        if isinstance(self.outputs, torch.Tensor):
            return self.outputs
        return self.outputs.local

    def to(self, dtype: torch.dtype) -> OutputsOfPositions:
        return self._replace(outputs=self.outputs.to(dtype))

    def cross_entropy(self, targets: torch.Tensor, smoothing: float, ignore: int) -> torch.Tensor:
        """Computes functional.cross_entropy() with reduction="none" at all positions, in the shape
        of the targets, (n, positions); the same on all ranks.

        A rank gets the gradient of the losses at its positions. The losses of all ranks are
        gathered, so that a step counts them as in one process: one allreduce of n x positions
        numbers.
        """
        own = targets[:, self._rows(targets)]
        if isinstance(self.outputs, torch.Tensor):
            loss = functional.cross_entropy(
                self.outputs.flatten(0, 1),
                own.flatten(),
                reduction="none",
                label_smoothing=smoothing,
                ignore_index=ignore,
            )
        else:
            loss = self.outputs.cross_entropy(own, smoothing, ignore)
        gathered: torch.Tensor = _GatheredPositions.apply(
            loss.view(own.shape), self.link, self.positions, "context.loss"
        )
        return gathered

    def whole(self) -> torch.Tensor:
        """Returns the outputs at all positions. A collective."""
        own = self.outputs if isinstance(self.outputs, torch.Tensor) else self.outputs.whole()
        gathered: torch.Tensor = _GatheredPositions.apply(
            own, self.link, self.positions, "context.outputs"
        )
        return gathered

    def _rows(self, like: torch.Tensor) -> torch.Tensor:
        return self.positions.of(self.link.rank, like.device)


class _GatheredPositions(torch.autograd.Function):
    """Gathers x (n, own positions, ...) to (n, positions, ...). Every rank continues with the same
    numbers, so it knows the gradient of its part without communication."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, link: ContextLink, positions: PositionsOfRanks, name: str
    ) -> torch.Tensor:
        ctx.rows = positions.of(link.rank, x.device)
        # engines add up no bfloat16
        dtype = torch.promote_types(x.dtype, torch.float32)
        whole = x.new_zeros((len(x), positions.length, *x.shape[2:]), dtype=dtype)
        whole[:, ctx.rows] = x.detach().to(dtype)
        return link.sum(whole, name).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient[:, ctx.rows], None, None, None

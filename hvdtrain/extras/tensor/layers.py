"""Layers that replace nn.Linear and nn.Embedding if each rank has a part. Their parameters are
plain tensors with the shape of the part.

With sequence parallelism (`link.positions`; Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2) tensors that are "the same on all ranks" below are partitioned by positions instead, axis -2.
Tensors are (..., positions, features). A reduce-scatter replaces the sum over ranks, and gives each
rank the sum at its positions. A layer that reads a replicated tensor gathers positions. A rank
keeps only its positions for backward, and gathers them again there.

Ranks send complete positions as rows: axis -2 comes first in memory, so that a part of it is
contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hvdtrain.extras.tensor.collectives import (
    SequenceLength,
    SplitLogits,
    TensorParallelLink,
    VocabularyRange,
    copy_to_ranks,
    sum_over_ranks,
)

Waiting = Callable[[], torch.Tensor]  # waits for the result of a started collective


class ColumnsLinear(nn.Module):
    """x (..., inputs), the same on all ranks -> this rank's part of the outputs, (..., outputs /
    ranks).

    The matrix (outputs, inputs) of nn.Linear is partitioned by rows, which are columns in the
    paper's Y = XA.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, link: TensorParallelLink
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._link = link

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._link.positions:
            return linear_of_all_positions(x, self.weight, self.bias, self._link)
        return functional.linear(copy_to_ranks(x, self._link), self.weight, self.bias)


class RowsLinear(nn.Module):
    """This rank's part of x, (..., inputs / ranks) -> (..., outputs), the same on all ranks; the
    bias is replicated, and added to the sum."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, link: TensorParallelLink
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._link = link

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._link.positions:
            # if this were not contiguous, linear() would keep a copy of it for backward
            rows = x.movedim(-2, 0)
            rows = (
                functional.linear(rows, self.weight)
                if rows.is_contiguous()
                else functional.linear(x, self.weight).movedim(-2, 0)
            )
            y = sum_of_own_positions(rows, self._link)
        else:
            y = sum_over_ranks(functional.linear(x, self.weight), self._link)
        # 16-bit under autocast, as the output of nn.Linear
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyHead(ColumnsLinear):
    """x (..., width) -> the logits of this rank's part of the vocabulary."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        link: TensorParallelLink,
        rows: VocabularyRange,
    ) -> None:
        super().__init__(weight, bias, link)
        self._rows = rows
        self.gives_whole = False  # all logits, for a loss that needs them

    def forward(self, x: torch.Tensor) -> torch.Tensor | SplitLogits:  # type: ignore[override]
        logits = super().forward(x)
        if self._link.positions:
            # in the order of their indices, as the loss reads them; a copy, as FSDP2 warns about
            # views
            logits = logits.clone(memory_format=torch.contiguous_format)
        split = SplitLogits(logits, self._link, self._rows)
        return split.whole() if self.gives_whole else split


def give_whole_logits(model: nn.Module) -> None:
    """Makes the model's VocabularyHead return the logits of all ranks, for user-defined losses."""
    for module in model.modules():
        if isinstance(module, VocabularyHead):
            module.gives_whole = True


class VocabularyEmbedding(nn.Module):
    """Tokens (...), the same on all ranks -> (..., width), the same on all ranks; a rank has the
    rows of its part of the vocabulary."""

    def __init__(
        self, weight: nn.Parameter, link: TensorParallelLink, rows: VocabularyRange
    ) -> None:
        super().__init__()
        self.weight = weight
        self._link = link
        self._first = rows.first

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        row = (tokens.movedim(-1, 0) if self._link.positions else tokens) - self._first
        is_elsewhere = (row < 0) | (row >= len(self.weight))
        mine = functional.embedding(row.masked_fill(is_elsewhere, 0), self.weight)
        mine = mine.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return (
            sum_of_own_positions(mine, self._link)
            if self._link.positions
            else sum_over_ranks(mine, self._link)
        )


class OwnPositionsEmbedding(nn.Module):
    """Indices (..., m), the same on all ranks -> (..., m / ranks, width), at this rank's positions;
    the weight is replicated."""

    def __init__(self, weight: nn.Parameter, link: TensorParallelLink) -> None:
        super().__init__()
        self.weight = weight
        self._link = link

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        assert self._link.positions is not None
        self._link.positions.count = indices.shape[-1]
        return functional.embedding(
            indices[..., self._link.positions.part(self._link.communicator)], self.weight
        )


def linear_of_all_positions(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, link: TensorParallelLink
) -> torch.Tensor:
    """Applies a rank's part of a linear layer to all positions: x (..., m / ranks, inputs), a
    rank's positions -> (..., m, outputs). Backward is a reduce-scatter."""
    device = x.device.type
    if torch.is_autocast_enabled(device):  # before it is sent
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    outputs: torch.Tensor = _LinearOfAllPositions.apply(x, weight, bias, link)
    return outputs


def sum_of_own_positions(rows: torch.Tensor, link: TensorParallelLink) -> torch.Tensor:
    """Sums over ranks at this rank's positions: rows (m, ..., features) on every rank -> (..., m /
    ranks, features). Backward gathers.

    `rows` may be overwritten.
    """
    total: torch.Tensor = _SumOfOwnPositions.apply(rows, link)
    return total


class _LinearOfAllPositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        link: TensorParallelLink,
    ) -> torch.Tensor:
        positions = _positions(link)
        ctx.save_for_backward(x, weight)
        ctx.link = link
        ctx.count = positions.count
        rows = _start_gather(x, link, positions.count, "forward")()
        return functional.linear(rows, weight, bias).movedim(0, -2)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        """Computes gradients. With an asynchronous engine, one matrix product overlaps the gather
        of x, and the other overlaps the sum of its gradient."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = dy.movedim(-2, 0)  # (m, ..., outputs)
        gathered = _start_gather(x, ctx.link, ctx.count, "again") if wants_weight else None
        dx = _start_sum(rows @ weight, ctx.link, "backward") if wants_x else None
        flat = rows.flatten(0, -2)
        dweight = flat.T @ gathered().flatten(0, -2) if gathered else None
        return dx() if dx else None, dweight, flat.sum(0) if wants_bias else None, None


class _SumOfOwnPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, link: TensorParallelLink) -> torch.Tensor:
        ctx.link = link
        ctx.count = len(rows)
        _positions(link).count = len(rows)
        return _start_sum(rows, link, "forward")()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _start_gather(dy, ctx.link, ctx.count, "backward")(), None


def _positions(link: TensorParallelLink) -> SequenceLength:
    assert link.positions is not None, link.layer
    return link.positions


def _start_gather(x: torch.Tensor, link: TensorParallelLink, count: int, direction: str) -> Waiting:
    """Starts to gather x (..., m / ranks, features) into rows (m, ..., features) of all ranks, m =
    count."""
    own = x.detach().movedim(-2, 0)
    part = SequenceLength(count).part(link.communicator)
    assert len(own) == part.stop - part.start, (
        f"{link.layer} has {len(own)} positions, which is not its part of {count}"
    )
    with torch.inference_mode(False):
        whole = own.new_empty((count, *own.shape[1:]), device=link.device_of(x))
        whole[part] = own
        # no engine moves bfloat16 by its name
        dtype = torch.int16 if x.dtype == torch.bfloat16 else x.dtype
        handle = link.communicator.start_spread(whole.view(dtype), link.name_of(direction))

    def wait() -> torch.Tensor:
        with torch.inference_mode(False):
            found: torch.Tensor = handle.wait()
        return found.view(x.dtype).to(x.device)

    return wait


def _start_sum(rows: torch.Tensor, link: TensorParallelLink, direction: str) -> Waiting:
    """Starts the reduce-scatter of rows (m, ..., features) to (..., m / ranks, features), in new
    memory."""
    with torch.inference_mode(False):
        operand = link.ready(rows.detach().to(link.sum_dtype(rows)))
        handle = link.communicator.start_reduce_scatter(operand, link.name_of(direction))

    def wait() -> torch.Tensor:
        with torch.inference_mode(False):
            found: torch.Tensor = handle.wait()
        # a copy, even for one sample, because a view would keep all rows in memory
        return (
            found.to(rows.device, rows.dtype)
            .movedim(0, -2)
            .clone(memory_format=torch.contiguous_format)
        )

    return wait

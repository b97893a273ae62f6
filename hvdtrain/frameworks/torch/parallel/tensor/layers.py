"""Layers of which a rank has a part, in the place of nn.Linear and nn.Embedding; their parameters are plain, of the shapes of the part.

With sequence parallelism (`link.positions`) what is "the same on all ranks" here is a rank's part of the positions instead, axis -2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.frameworks.torch.parallel.tensor.collectives import Link, copy_to_ranks, sum_over_ranks
from hvdtrain.frameworks.torch.parallel.tensor.sequence import linear_of_all_positions, sum_of_own_positions
from hvdtrain.frameworks.torch.parallel.tensor.split_logits import Rows, SplitLogits


class ColumnsLinear(nn.Module):
    """x (..., inputs), the same on all ranks -> this rank's part of the outputs, (..., outputs / ranks).

    The matrix (outputs, inputs) of nn.Linear is cut by rows, which are columns in the paper's Y = XA.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, link: Link) -> None:
        super().__init__()
        self.weight, self.bias, self._link = weight, bias, link

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._link.positions:
            return linear_of_all_positions(x, self.weight, self.bias, self._link)
        return functional.linear(copy_to_ranks(x, self._link), self.weight, self.bias)


class RowsLinear(nn.Module):
    """This rank's part of x, (..., inputs / ranks) -> (..., outputs), the same on all ranks; the bias is whole, and added to the sum."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, link: Link) -> None:
        super().__init__()
        self.weight, self.bias, self._link = weight, bias, link

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._link.positions:
            rows = x.movedim(-2, 0)  # where it is no contiguous memory, linear() would keep a copy of it for backward
            rows = functional.linear(rows, self.weight) if rows.is_contiguous() else functional.linear(x, self.weight).movedim(-2, 0)
            y = sum_of_own_positions(rows, self._link)
        else:
            y = sum_over_ranks(functional.linear(x, self.weight), self._link)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # 16-bit under autocast, as the output of nn.Linear


class VocabularyHead(ColumnsLinear):
    """x (..., width) -> the logits of this rank's part of the vocabulary."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, link: Link, rows: Rows) -> None:
        super().__init__(weight, bias, link)
        self._rows = rows

    def forward(self, x: torch.Tensor) -> SplitLogits:  # type: ignore[override]
        logits = super().forward(x)
        if self._link.positions:  # in the order of their indices, as the loss reads them; and no view, of which FSDP2 warns
            logits = logits.clone(memory_format=torch.contiguous_format)
        return SplitLogits(logits, self._link, self._rows)


class VocabularyEmbedding(nn.Module):
    """Tokens (...), the same on all ranks -> (..., width), likewise; a rank has the rows of its part of the vocabulary."""

    def __init__(self, weight: nn.Parameter, link: Link, rows: Rows) -> None:
        super().__init__()
        self.weight, self._link, self._first = weight, link, rows.first

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        row = (tokens.movedim(-1, 0) if self._link.positions else tokens) - self._first
        is_elsewhere = (row < 0) | (row >= len(self.weight))
        mine = functional.embedding(row.masked_fill(is_elsewhere, 0), self.weight)
        mine = mine.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return sum_of_own_positions(mine, self._link) if self._link.positions else sum_over_ranks(mine, self._link)


class OwnPositionsEmbedding(nn.Module):
    """Indices (..., m), the same on all ranks -> (..., m / ranks, width), of this rank's positions; the weight is whole."""

    def __init__(self, weight: nn.Parameter, link: Link) -> None:
        super().__init__()
        self.weight, self._link = weight, link

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        assert self._link.positions is not None
        self._link.positions.count = indices.shape[-1]
        return functional.embedding(indices[..., self._link.positions.part(self._link.communicator)], self.weight)

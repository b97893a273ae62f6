"""Logits of which each tensor rank has those of a part of the vocabulary, and their cross-entropy, for which they are not gathered."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hvdtrain.frameworks.torch.parallel.tensor.collectives import Link


class Rows(NamedTuple):
    """Which tokens a rank has."""

    first: int
    vocabulary: int  # of all ranks


class SplitLogits(NamedTuple):
    """The logits of the v tokens from rows.first on. A NamedTuple: torch finds the tensor in it."""

    local: torch.Tensor  # (..., v)
    link: Link
    rows: Rows

    def to(self, dtype: torch.dtype) -> SplitLogits:
        return self._replace(local=self.local.to(dtype))

    def cross_entropy(self, targets: torch.Tensor, smoothing: float, ignore: int) -> torch.Tensor:
        """What functional.cross_entropy() with reduction="none" gives for whole logits, of the shape of the targets; the same on all ranks.

        targets: int64 (...), the same on all ranks; those that are `ignore` have the loss 0
        """
        loss: torch.Tensor = _CrossEntropy.apply(self.local.flatten(0, -2), targets.flatten(), smoothing, ignore, self.link, self.rows)
        return loss.view(targets.shape)

    def whole(self) -> torch.Tensor:
        """The logits of all ranks, (..., vocabulary). A collective.

        Every rank goes on with the same ones, and so knows the gradient of its own part without the others.
        """
        found: torch.Tensor = _Whole.apply(self.local, self.link, self.rows)
        return found


def whole_logits(outputs: torch.Tensor | SplitLogits) -> torch.Tensor:
    """A model's logits (..., vocabulary). A collective where they are split."""
    return outputs.whole() if isinstance(outputs, SplitLogits) else outputs


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: Link, rows: Rows) -> torch.Tensor:
        """x (..., v) -> (..., vocabulary)"""
        ctx.first, ctx.length = rows.first, x.shape[-1]
        return link.gather(x.movedim(-1, 0), "whole").movedim(0, -1).contiguous()  # no view, of which FSDP2 warns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy[..., ctx.first : ctx.first + ctx.length].contiguous(), None, None


class _CrossEntropy(torch.autograd.Function):
    """For logits x_i, i < V, and a smoothing e: log(sum exp x_i) - (1 - e) x_target - e / V sum x_i.

    (Szegedy et al. 2015, arXiv:1512.00567, section 7; ranks: Shoeybi et al. 2019, section 3.)

    One allreduce, of two or three numbers for each target and rank; each rank then adds up the same numbers in the same order.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, targets: torch.Tensor, smoothing: float, ignore: int, link: Link, rows: Rows) -> torch.Tensor:
        """x (n, v), targets (n,) -> (n,)"""
        vocabulary = rows.vocabulary
        row = targets - rows.first
        is_mine = (row >= 0) & (row < x.shape[1])
        row = row.masked_fill(~is_mine, 0).unsqueeze(1)  # (n, 1)
        at_target = x.gather(1, row).squeeze(1).masked_fill(~is_mine, 0.0)
        mine = [x.logsumexp(1), at_target, *([x.sum(1)] if smoothing else [])]
        ranks = x.new_zeros((link.communicator.size, len(mine), len(x)), dtype=torch.promote_types(x.dtype, torch.float32))
        ranks[link.communicator.rank] = torch.stack(mine)
        ranks = link.sum(ranks, "loss")  # an allgather would send the lengths first, for which the host waits
        log_total = ranks[:, 0].logsumexp(0)
        loss = log_total - (1.0 - smoothing) * ranks[:, 1].sum(0)
        if smoothing:
            loss -= smoothing / vocabulary * ranks[:, 2].sum(0)
        is_ignored = targets == ignore
        ctx.save_for_backward(x, log_total, row, is_mine, is_ignored)
        ctx.smoothing, ctx.each = smoothing, smoothing / vocabulary
        return loss.masked_fill(is_ignored, 0.0).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        """softmax(x) - (1 - e) at the target - e / V, times dloss"""
        x, log_total, row, is_mine, is_ignored = ctx.saved_tensors
        dx = (x - log_total.unsqueeze(1)).exp_()
        if ctx.smoothing:
            dx -= ctx.each
        dx.scatter_add_(1, row, (is_mine.to(dx.dtype) * (ctx.smoothing - 1.0)).unsqueeze(1))
        dx *= dloss.to(dx.dtype).masked_fill(is_ignored, 0.0).unsqueeze(1)
        return dx.to(x.dtype), None, None, None, None, None

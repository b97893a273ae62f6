"""The communication of a tensor group in a step: operators f and g of Shoeybi et al. 2019, figure
3, and the loss of partitioned logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.comm.order import SameOrder
from hvdtrain.frameworks.torch.private_api import in_backward

_PASSES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "again": "gathering for the backward pass",
}


class SequenceLength:
    """The number of positions of the current samples; a rank has a part of them."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def part(self, communicator: Communicator) -> slice:
        """Returns the positions of a rank; if they do not divide evenly, the first ranks have one
        more."""
        return part_of(self.count, communicator.rank, communicator.size)


class TensorParallelLink(NamedTuple):
    """A layer's connection with the other ranks of its tensor group."""

    communicator: Communicator
    layer: str  # its name in the model; the stable names of its collectives contain it
    positions: SequenceLength | None = None  # with sequence parallelism (layers.py)
    order: SameOrder | None = None  # checks that these ranks compute layers in the same order

    def name_of(self, direction: str) -> str:
        """Returns the stable name of the next collective, after every rank has reached it."""
        if self.order:
            again = direction == "forward" and in_backward()
            doing = (
                f"{'recomputation' if again else _PASSES.get(direction, direction)} of {self.layer}"
            )
            self.order.ask(doing)
            self.order.at = doing
        return f"tensor.{self.layer}.{direction}"

    def sum(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """Returns the sum over ranks; may overwrite x."""
        with torch.inference_mode(False):
            found = self.communicator.allreduce(
                self.ready(x.detach().to(self.sum_dtype(x))), self.name_of(direction)
            )
        return found.to(x.device, x.dtype)

    def gather(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """Gathers x of every rank along axis 0, in rank order; the lengths of axis 0 may differ."""
        # no engine moves bfloat16 by its name
        dtype = torch.int16 if x.dtype == torch.bfloat16 else x.dtype
        with torch.inference_mode(False):
            mine = self.ready(x.detach()).view(dtype)
            found = self.communicator.allgather(mine, self.name_of(direction))
        return found.view(x.dtype).to(x.device)

    def sum_dtype(self, x: torch.Tensor) -> torch.dtype:
        """Returns the dtype in which the engine sums x."""
        return (
            torch.float32
            if x.dtype == torch.bfloat16 and "bfloat16_sums" not in self.communicator.features
            else x.dtype
        )

    def device_of(self, x: torch.Tensor) -> torch.device:
        """Returns the device on which the engine takes x."""
        return x.device if "device_memory" in self.communicator.features else torch.device("cpu")

    def ready(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor for an engine: contiguous, on the host or the device, and not an
        inference tensor, to which Horovod's thread cannot write."""
        x = x.clone() if x.is_inference() else x
        return x.to(self.device_of(x)).contiguous()


def copy_to_ranks(x: torch.Tensor, link: TensorParallelLink) -> torch.Tensor:
    """Operator f: returns x, which is replicated; its gradient is the sum over ranks, because each
    rank has a part of the layers.

    The incoming gradient may be overwritten, so only a layer that recomputes it may use the result.
    """
    copied: torch.Tensor = _CopyToRanks.apply(x, link)
    return copied


def sum_over_ranks(x: torch.Tensor, link: TensorParallelLink) -> torch.Tensor:
    """Operator g: returns the sum of x over ranks (x may be overwritten); each rank gets its
    gradient."""
    total: torch.Tensor = _SumOverRanks.apply(x, link)
    return total


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: TensorParallelLink) -> torch.Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.link.sum(dy, "backward"), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: TensorParallelLink) -> torch.Tensor:
        return link.sum(x, "forward")

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class VocabularyRange(NamedTuple):
    """The range of tokens of a rank."""

    first: int
    vocabulary: int  # size over all ranks


class SplitLogits(NamedTuple):
    """The logits of the v tokens from rows.first on. A NamedTuple: torch finds the tensor in it."""

    local: torch.Tensor  # (..., v)
    link: TensorParallelLink
    rows: VocabularyRange

    def to(self, dtype: torch.dtype) -> SplitLogits:
        return self._replace(local=self.local.to(dtype))

    def cross_entropy(self, targets: torch.Tensor, smoothing: float, ignore: int) -> torch.Tensor:
        """Computes functional.cross_entropy() with reduction="none" for the full logits, in the
        shape of the targets; the same on all ranks.

        targets: int64 (...), the same on all ranks; targets equal to `ignore` have the loss 0
        """
        loss: torch.Tensor = _CrossEntropy.apply(
            self.local.flatten(0, -2), targets.flatten(), smoothing, ignore, self.link, self.rows
        )
        return loss.view(targets.shape)

    def whole(self) -> torch.Tensor:
        """Returns the logits of all ranks, (..., vocabulary). A collective.

        Every rank continues with the same logits, so it knows the gradient of its part without
        communication.
        """
        gathered: torch.Tensor = _Whole.apply(self.local, self.link, self.rows)
        return gathered


def whole_logits(outputs: torch.Tensor | SplitLogits) -> torch.Tensor:
    """Returns a model's logits (..., vocabulary). A collective if they are split."""
    return outputs.whole() if isinstance(outputs, SplitLogits) else outputs


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, link: TensorParallelLink, rows: VocabularyRange
    ) -> torch.Tensor:
        """Gathers x (..., v) to (..., vocabulary)."""
        ctx.first = rows.first
        ctx.length = x.shape[-1]
        # FSDP2 warns about views
        return link.gather(x.movedim(-1, 0), "whole").movedim(0, -1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy[..., ctx.first : ctx.first + ctx.length].contiguous(), None, None


class _CrossEntropy(torch.autograd.Function):
    """For logits x_i, i < V, and a smoothing e: log(sum exp x_i) - (1 - e) x_target - e / V sum
    x_i.

    (Szegedy et al. 2015, arXiv:1512.00567, section 7; ranks: Shoeybi et al. 2019, section 3.)

    One allreduce, of two or three numbers for each target and rank; each rank then adds up the same
    numbers in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        targets: torch.Tensor,
        smoothing: float,
        ignore: int,
        link: TensorParallelLink,
        rows: VocabularyRange,
    ) -> torch.Tensor:
        """x (n, v), targets (n,) -> (n,)"""
        vocabulary = rows.vocabulary
        row = targets - rows.first
        is_mine = (row >= 0) & (row < x.shape[1])
        row = row.masked_fill(~is_mine, 0).unsqueeze(1)  # (n, 1)
        at_target = x.gather(1, row).squeeze(1).masked_fill(~is_mine, 0.0)
        mine = [x.logsumexp(1), at_target, *([x.sum(1)] if smoothing else [])]
        ranks = x.new_zeros(
            (link.communicator.size, len(mine), len(x)),
            dtype=torch.promote_types(x.dtype, torch.float32),
        )
        ranks[link.communicator.rank] = torch.stack(mine)
        # an allgather would send the lengths first, and the host would wait for them
        ranks = link.sum(ranks, "loss")
        log_total = ranks[:, 0].logsumexp(0)
        loss = log_total - (1.0 - smoothing) * ranks[:, 1].sum(0)
        if smoothing:
            loss -= smoothing / vocabulary * ranks[:, 2].sum(0)
        is_ignored = targets == ignore
        ctx.save_for_backward(x, log_total, row, is_mine, is_ignored)
        ctx.smoothing = smoothing
        ctx.each = smoothing / vocabulary
        return loss.masked_fill(is_ignored, 0.0).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        """softmax(x) - (1 - e) at the target - e / V, times dloss"""
        x, log_total, row, is_mine, is_ignored = ctx.saved_tensors
        dx = (x - log_total.unsqueeze(1)).exp_()
        if ctx.smoothing:
            dx -= ctx.each
        dx.scatter_add_(1, row, (is_mine.to(dx.dtype) * (ctx.smoothing - 1.0)).unsqueeze(1))
        dx *= dloss.to(dx.dtype).masked_fill(is_ignored, 0.0).unsqueeze(1)
        return dx.to(x.dtype), None, None, None, None, None

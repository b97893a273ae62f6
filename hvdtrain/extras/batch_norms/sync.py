"""norm.kind=sync: batch norm over the samples of all ranks in a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import SameOrder
from hvdtrain.extras.batch_norms.running import take_over, update_running
from hvdtrain.frameworks.torch.private_api import BatchNorm
from hvdtrain.frameworks.torch.strategy import reduction_device, runs_ahead


class SyncBatchNorm(BatchNorm):
    """A batch norm over the samples of all ranks in training; a rank's share may be empty. In
    evaluation it is a plain norm.

    In training every rank must call it equally often, in the same order, and run backward through
    each call once if its input requires a gradient. A rank without samples passes an empty batch,
    (0, C, ...). Gradients of weight and bias are this rank's part of the sum. Running statistics
    are bit-identical on all ranks. One value per channel over all ranks raises ValueError, as in
    torch. Ranks that reach different norms of `order` raise UserError.
    """

    def __init__(
        self, norm: BatchNorm, communicator: Communicator, layer: str, order: SameOrder
    ) -> None:
        super().__init__(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            device="meta",
        )
        take_over(self, norm)
        self.communicator = communicator
        self.layer = layer
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.communicator.size == 1:
            return super().forward(x)
        self.order.ask(f"forward pass of {self.layer}")
        total, mean, var = self._gather_statistics(x.detach())
        update_running(
            self, mean.unsqueeze(0), (var * (total / (total - 1))).unsqueeze(0), one_by_one=False
        )
        return _Normalise.apply(x, self.weight, self.bias, (total, mean, var), self)

    def _gather_statistics(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns values per channel (1,), mean (C,) and biased variance (C,) over all ranks, using
        one collective with rows of equal length.

        The counts are sent with the rest, so the host does not wait for a GPU. Means and variances
        of parts combine without cancellation (Chan, Golub, LeVeque 1979, eq. 2.1), unlike sums of
        squares.
        """
        channels = self.num_features
        local = x.numel() // self.num_features
        ranks = self.communicator
        rows = x.new_zeros(
            (ranks.size, 1 + 2 * channels), dtype=torch.promote_types(x.dtype, torch.float32)
        )
        if local:
            mine = rows[ranks.rank]
            mine[0].fill_(local)
            # mean, biased variance
            mine[1:] = torch.cat(torch.batch_norm_update_stats(x.to(rows.dtype), None, None, 1.0))
        handle = ranks.start_spread(
            rows.to(reduction_device(x.device, ranks)), f"sync_norm.{self.layer}.forward"
        )
        # (size, 1), (size, C), (size, C)
        counts, means, variances = handle.wait().to(x.device).split([1, channels, channels], dim=1)
        total = counts.sum(0)
        if local <= 1 and total <= 1:  # for a larger batch, the host need not wait for the total
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape} "
                f"and {int(total)} on all ranks"
            )
        share = counts / total
        mean = (share * means).sum(0)
        return total, mean, (share * (variances + (means - mean).square())).sum(0)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accepts any input with a channel axis 1."""


class _Normalise(torch.autograd.Function):
    """Computes y = w xhat + b, xhat = (x - mean) / sqrt(var + eps), where mean and var depend on x
    on every rank.

    Backward, over all N values of a channel: dx = w / sqrt(var + eps) (dy - sum(dy) / N - xhat
    sum(dy xhat) / N) (Ioffe and Szegedy 2015, arXiv:1502.03167, section 3). torch's kernel for
    fixed statistics computes the first term and both sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        norm: SyncBatchNorm,
    ) -> torch.Tensor:
        total, mean, var = statistics
        ctx.norm = norm
        ctx.save_for_backward(x, weight, total, mean, var)
        return (
            functional.batch_norm(x, mean, var, weight, bias, eps=norm.eps)
            if len(x)
            else torch.empty_like(x)
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, total, mean, var = ctx.saved_tensors
        norm: SyncBatchNorm = ctx.norm
        dx = torch.empty_like(x)
        dw = torch.zeros_like(mean)
        db = torch.zeros_like(mean)
        if len(x):
            fixed = torch.ops.aten.native_batch_norm_backward
            dx, dw, db = fixed(
                dy.contiguous(),
                x,
                weight,
                mean,
                var,
                None,
                None,
                False,
                norm.eps,
                [True, True, True],
            )
        if ctx.needs_input_grad[0]:
            norm.order.ask(f"backward pass of {norm.layer}")
            sums = torch.cat([dw, db]).to(reduction_device(x.device, norm.communicator))
            sums = norm.communicator.allreduce(sums, f"sync_norm.{norm.layer}.backward").to(
                x.device
            )
            slope = (
                (var + norm.eps).rsqrt() if weight is None else weight * (var + norm.eps).rsqrt()
            )
            dw_mean, db_mean = (sums / total).split(len(mean))
            if len(x):
                dx = dx - functional.batch_norm(
                    x, mean, var, slope * dw_mean, slope * db_mean, eps=norm.eps
                )
        return (
            dx,
            dw if ctx.needs_input_grad[1] else None,
            db if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def order_of_norms(communicator: Communicator, device: torch.device) -> SameOrder:
    fix = (
        "the same norms on every rank: with a weight of 0, or chosen by what all ranks have; or "
        "norm.kind=batch or ghost"
    )
    return SameOrder(
        communicator,
        communicator.rank,
        "norm.kind=sync",
        fix,
        lags=runs_ahead(device, communicator),
    )


def end_forward(order: SameOrder, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    """Ends the order of norms, as a forward hook of the model: from here on, a rank with fewer
    norms issues collectives of another kind."""
    if model.training:
        order.end("end of the forward pass", backward_follows=torch.is_grad_enabled())

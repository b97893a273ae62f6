"""Batch norm over the samples of all ranks, on any engine; and what ghost batch norm uses too: the parts of torch's own norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.same_order import SameOrder
from hvdtrain.frameworks.torch.parallel.strategy import reduction_device


class SyncBatchNorm(_BatchNorm):
    """In training the batch is that of all ranks together, whose shares may differ and be empty; in evaluation it is the plain norm.

    In training every rank must call it equally often, in the same order, and go backward through each call once if its input requires a
    gradient: a rank without samples with an empty batch, (0, C, ...). Gradients of weight and bias are this rank's part of the sum.
    Running statistics come out equal on all ranks, to the last bit. One value per channel over all ranks is torch's ValueError, and ranks
    that come to different norms of `order` a UserError.
    """

    def __init__(self, norm: _BatchNorm, communicator: Communicator, layer: str, order: SameOrder) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta")
        take_over(self, norm)
        self.communicator, self.layer, self.order = communicator, layer, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.communicator.size == 1:
            return super().forward(x)
        self.order.ask(f"forward pass of {self.layer}")
        total, mean, var = self._gather_statistics(x.detach())
        update_running(self, mean.unsqueeze(0), (var * (total / (total - 1))).unsqueeze(0), one_by_one=False)
        return _Normalise.apply(x, self.weight, self.bias, (total, mean, var), self)

    def _gather_statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Over all ranks: values per channel (1,), mean (C,) and biased variance (C,), by one collective of rows of equal length.

        The counts travel with the rest, so a host that uses a GPU waits for no device. Means and variances of parts combine without
        cancellation (Chan, Golub, LeVeque 1979, eq. 2.1): sums of squares would not.
        """
        channels, local, ranks = self.num_features, x.numel() // self.num_features, self.communicator
        rows = x.new_zeros((ranks.size, 1 + 2 * channels), dtype=torch.promote_types(x.dtype, torch.float32))
        if local:
            mine = rows[ranks.rank]
            mine[0].fill_(local)
            mine[1:] = torch.cat(torch.batch_norm_update_stats(x.to(rows.dtype), None, None, 1.0))  # mean, biased variance
        handle = ranks.start_spread(rows.to(reduction_device(x.device, ranks)), f"sync_norm.{self.layer}.forward")
        counts, means, variances = handle.wait().to(x.device).split([1, channels, channels], dim=1)  # (size, 1), (size, C), (size, C)
        total = counts.sum(0)
        if local <= 1 and total <= 1:  # a larger batch needs no look at the total, for which the host waits
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape} and {int(total)} on all ranks"
            )
        share = counts / total
        mean = (share * means).sum(0)
        return total, mean, (share * (variances + (means - mean).square())).sum(0)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """The kernel takes whatever has a channel axis 1."""


class _Normalise(torch.autograd.Function):
    """y = w xhat + b, xhat = (x - mean) / sqrt(var + eps), where mean and var depend on the x of every rank.

    Backward, over all N values of a channel: dx = w / sqrt(var + eps) (dy - sum(dy) / N - xhat sum(dy xhat) / N)
    (Ioffe and Szegedy 2015, arXiv:1502.03167, section 3). torch's kernel for fixed statistics gives the first term, and both sums.
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
        return functional.batch_norm(x, mean, var, weight, bias, eps=norm.eps) if len(x) else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, total, mean, var = ctx.saved_tensors
        norm: SyncBatchNorm = ctx.norm
        dx, dw, db = torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if len(x):
            fixed = torch.ops.aten.native_batch_norm_backward
            dx, dw, db = fixed(dy.contiguous(), x, weight, mean, var, None, None, False, norm.eps, [True, True, True])
        if ctx.needs_input_grad[0]:
            norm.order.ask(f"backward pass of {norm.layer}")
            sums = torch.cat([dw, db]).to(reduction_device(x.device, norm.communicator))
            sums = norm.communicator.allreduce(sums, f"sync_norm.{norm.layer}.backward").to(x.device)
            slope = (var + norm.eps).rsqrt() if weight is None else weight * (var + norm.eps).rsqrt()
            dw_mean, db_mean = (sums / total).split(len(mean))
            if len(x):
                dx = dx - functional.batch_norm(x, mean, var, slope * dw_mean, slope * db_mean, eps=norm.eps)
        return dx, dw if ctx.needs_input_grad[1] else None, db if ctx.needs_input_grad[2] else None, None, None


def order_of_norms(communicator: Communicator) -> SameOrder:
    fix = "the same norms on every rank: with a weight of 0, or chosen by what all ranks have; or norm.kind=batch or ghost"
    return SameOrder(communicator, communicator.rank, "norm.kind=sync", fix, lags="nccl" in communicator.features)


def orders_of_norms(model: torch.nn.Module) -> list[SameOrder]:
    return list(dict.fromkeys(module.order for module in model.modules() if isinstance(module, SyncBatchNorm)))


def end_forward(order: SameOrder, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    """A forward hook of the model: a rank with fewer norms goes on to collectives of another kind."""
    if model.training:
        order.end("end of the forward pass")


def take_over(new: _BatchNorm, old: _BatchNorm) -> None:
    """Gives `new` the parameters and buffers of `old`, themselves, and whether it trains."""
    new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var, new.num_batches_tracked = old.running_mean, old.running_var, old.num_batches_tracked
    new.training = old.training


def update_running(norm: _BatchNorm, means: torch.Tensor, variances: torch.Tensor, one_by_one: bool) -> None:
    """Moves the running statistics towards those of S batches, (S, C): by one update with their mean, or by one with each in order.

    One by one, batch s ends with the weight m (1 - m)^(S - 1 - s), and the old value with (1 - m)^S. momentum=None is the mean over all
    updates until now, each of equal weight.
    """
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    updates = len(means) if one_by_one else 1
    norm.num_batches_tracked += updates
    keep: float | torch.Tensor
    if one_by_one and norm.momentum is not None:
        later = torch.arange(updates - 1, -1, -1, dtype=means.dtype, device=means.device)  # updates after each
        weights, keep = norm.momentum * (1 - norm.momentum) ** later, (1 - norm.momentum) ** updates
    elif norm.momentum is not None:
        weights, keep = means.new_full((len(means),), norm.momentum / len(means)), 1 - norm.momentum
    else:
        share = updates / norm.num_batches_tracked.double()  # on the device, for which the host would have to wait
        weights, keep = (share / len(means)).to(means.dtype).expand(len(means)), 1 - share
    with torch.no_grad():
        norm.running_mean.mul_(keep).add_((weights.unsqueeze(1) * means).sum(0))
        norm.running_var.mul_(keep).add_((weights.unsqueeze(1) * variances).sum(0))

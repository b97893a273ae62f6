"""SyncBatchNorm: batch norm with the mean and variance over the samples of all ranks, also on
CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.horovod.call import Sum
from hvdtrain.horovod.collectives import allgather
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.reductions import allreduce


class SyncBatchNorm(_BatchNorm):
    """Batch norm like torch.nn.BatchNorm1d, 2d and 3d, for (N, C, ...), with statistics over the
    samples of all ranks in training."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        is_by_batch = self.training or not self.track_running_stats
        if not is_by_batch or JOB.engine.size == 1:
            return super().forward(input)
        found, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._update(mean, variance * (count / (count - 1).clamp(min=1)))
        result: torch.Tensor = found
        return result

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Updates the running statistics. variance: unbiased."""
        assert (
            self.num_batches_tracked is not None
            and self.running_mean is not None
            and self.running_var is not None
        )
        self.num_batches_tracked.add_(1)
        for running, found in ((self.running_mean, mean), (self.running_var, variance)):
            if self.momentum is not None:
                running.lerp_(found.to(running.dtype), self.momentum)
            else:  # on the device, for which the host would have to wait
                running.lerp_(
                    found.to(running.dtype),
                    self.num_batches_tracked.double().reciprocal().to(running.dtype),
                )


class _Normalize(torch.autograd.Function):
    """Returns the output, and mean, biased variance (C,) and number of values in each channel, over
    all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> Any:
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        values = x.detach().to(precise)
        axes = [0, *range(2, x.dim())]
        # filled by the device: a copy to it would wait
        own_count = values.new_full((1,), x.numel() // x.size(1))
        mean_here = values.mean(axes) if len(x) else values.new_zeros(x.size(1))
        squares_here = (values - _spread(mean_here, x)).square().sum(axes)
        # (ranks, 1 + 2 C)
        gathered = allgather(torch.cat([own_count, mean_here, squares_here])[None])
        counts = gathered[:, :1]
        means = gathered[:, 1 : 1 + x.size(1)]
        squares = gathered[:, 1 + x.size(1) :]
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        # Chan et al. 1983: squares around the common mean = squares around the ranks' means +
        # squares of the differences of the means.
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        scale = (variance + eps).rsqrt()
        normal = (values - _spread(mean, x)) * _spread(scale, x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.mark_non_differentiable(mean, variance, count)
        out = normal if weight is None else normal * _spread(weight.to(precise), x)
        out = out if bias is None else out + _spread(bias.to(precise), x)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        normal, scale, weight, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        axes = [0, *range(2, normal.dim())]
        sum_here = grad.sum(axes)
        product_here = (grad * normal).sum(axes)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums, products = allreduce(torch.stack([sum_here, product_here]), op=Sum) / count
            inner = grad - _spread(sums, normal) - normal * _spread(products, normal)
            factor = scale if weight is None else scale * weight.to(normal.dtype)
            of_input = (inner * _spread(factor, normal)).to(grads[0].dtype)
        of_weight = (
            product_here.to(weight.dtype)
            if weight is not None and ctx.needs_input_grad[1]
            else None
        )
        of_bias = (
            sum_here.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        )
        return of_input, of_weight, of_bias, None


def _spread(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns (C,) -> (1, C, 1, ...)"""
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))

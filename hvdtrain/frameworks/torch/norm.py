"""norm.kind: use_norm() replaces a model's batch norms, by ghost batch norms or by those over the
samples of all ranks."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import SameOrder
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.private_api import BatchNorm
from hvdtrain.frameworks.torch.strategy import reduction_device, runs_ahead

CPU = torch.device("cpu")
Kind = Literal["batch", "ghost", "sync"]
Statistics = Literal["averaged", "sequential"]


def use_norm(
    model: nn.Module,
    kind: Kind,
    ghost: int,
    statistics: Statistics,
    communicator: Communicator,
    device: torch.device = CPU,
) -> nn.Module:
    """Replaces BatchNorm1d, 2d, 3d and SyncBatchNorm layers, at any depth, by ghost or sync norms;
    with kind=batch by nothing. device: on which the model will be.

    In place, except for a model that is itself a norm. The new layers have the weights, buffers,
    settings and state_dict names of the old, not their hooks. With ghost, call the model as
    model(batch, ...): its first input and its output have a row for each sample, in the order of
    the batch. With sync, every rank calls it equally often, a rank without samples with an empty
    batch.

    Raises UserError if the model has no such layer, or one that cannot be replaced.
    """
    if kind == "batch":
        return model
    ghosts = Ghosts(ghost)
    order = order_of_norms(communicator, device)
    replacements: dict[nn.Module, nn.Module] = {}
    for name, norm in model.named_modules():  # a layer in two places appears once
        if isinstance(norm, BatchNorm):
            check_replaceable(norm, name, kind)
            if kind == "ghost":
                replacements[norm] = GhostBatchNorm(norm, ghosts, statistics)
            else:
                replacements[norm] = SyncBatchNorm(norm, communicator, name or "model", order)
    if not replacements:
        raise UserError(
            "the model has no batch norm layer, so norm.kind has no effect",
            f"norm.kind={kind}",
            "norm.kind=batch",
        )
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in replacements:
                setattr(parent, name, replacements[child])
    model = replacements.get(model, model)
    if kind == "ghost":
        model.register_forward_pre_hook(ghosts.before_forward)
        model.register_forward_hook(ghosts.after_forward)
    else:
        model.register_forward_hook(functools.partial(end_forward, order))
    return model


def check_replaceable(norm: BatchNorm, name: str, kind: Kind) -> None:
    """Raises UserError for a layer that cannot be replaced without loss."""
    layer = f"{name or 'the model'} ({type(norm).__name__})"
    where = f"norm.kind={kind}"
    if isinstance(norm, LazyModuleMixin):
        raise UserError(
            f"{layer} has no fixed number of channels yet",
            where,
            "give it: nn.BatchNorm2d(64), not nn.LazyBatchNorm2d()",
        )
    if type(norm).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise UserError(
            f"{layer} overrides the computation of batch norm, which norm.kind={kind} would "
            "replace",
            where,
            "norm.kind=batch, or torch's own BatchNorm",
        )


class GhostBatchNorm(BatchNorm):
    """Batch norm over each ghost batch of `ghosts.ghost` samples; the last one may be smaller. With
    a single ghost batch it is plain batch norm.

    (Hoffer 2017, arXiv:1705.08741, algorithm 1.) Sample i of a forward pass belongs to ghost i //
    g, and each ghost is normalised separately. A contiguous (n, C, L) tensor can be viewed as (g, S
    C, L), which one plain kernel normalises, but then its S ghosts consist of the samples i mod S.
    So the model's input is interleaved once, such that the samples of ghost s are at s, s + S, s +
    2 S, ..., and its output is put back in order. Hooks on the model do both, so callers see the
    order of the batch.

    Within a model of use_norm, ghosts are contiguous samples of the batch; a layer called
    separately uses the samples i mod S. A sample may have several consecutive rows, (n T, C). Any
    memory format works; channels_last needs a copy.
    """

    def __init__(self, norm: BatchNorm, ghosts: Ghosts, statistics: Statistics) -> None:
        super().__init__(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            device="meta",
        )
        take_over(self, norm)
        self.ghosts = ghosts
        self.statistics = statistics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes x (n, C, ...). Raises UserError if the rows of x do not split evenly among the
        samples."""
        samples = self.ghosts.samples or len(x)
        ghost = self.ghosts.ghost
        if not self.training or samples <= ghost:
            return super().forward(x)
        if len(x) % samples:
            what = (
                f"a batch norm gets {len(x)} rows from {samples} samples, so it cannot be split "
                "into ghosts"
            )
            raise UserError(what, "norm.kind=ghost", "norm.kind=sync or norm.kind=batch")
        rows = len(x) // samples
        full, rest = divmod(samples, ghost)  # ghosts, samples of a smaller last one
        if not rest:  # even a slice of all rows would need a copy in backward
            y, means, variances = self._normalise(x, full, rows)
        else:
            x_full, x_rest = x.split([full * ghost * rows, rest * rows])
            y_full, means_full, variances_full = self._normalise(x_full, full, rows)
            y_rest, mean_rest, variance_rest = self._normalise(x_rest, 1, rows)
            y = torch.cat([y_full, y_rest])
            means = torch.cat([means_full, mean_rest])
            variances = torch.cat([variances_full, variance_rest])
        update_running(self, means, variances, one_by_one=self.statistics == "sequential")
        return y

    def _normalise(
        self, x: torch.Tensor, count: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalizes x in `count` ghost batches of equal size with `rows` rows per sample; returns
        the mean and unbiased variance of each, (count, C)."""
        channels = self.num_features
        plane = math.prod(x.shape[2:])
        if len(x) * plane == count:
            # torch rejects such a batch, too; here the batch may be large and only its last ghost
            # too small
            what = (
                f"a ghost batch of {len(x) // rows // count} sample has one value per channel "
                f"({tuple(x.shape)}), and therefore no variance"
            )
            raise UserError(
                what,
                "norm.ghost",
                "a norm.ghost that divides the samples of a rank's forward pass, or leaves a "
                "remainder of at least two",
            )
        x_ghosts = x.reshape(-1, count, rows, channels, plane).transpose(2, 3)  # (g, S, C, rows, L)
        # a view of x, if it is contiguous and rows is 1
        flat = x_ghosts.reshape(-1, count * channels, rows * plane)
        like = (
            x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
            if self.running_mean is None
            else self.running_mean
        )
        means = like.new_zeros(count * channels)
        variances = like.new_zeros(count * channels)
        weight, bias = (None if p is None else p.repeat(count) for p in (self.weight, self.bias))
        y = functional.batch_norm(
            flat, means, variances, weight, bias, training=True, momentum=1.0, eps=self.eps
        )
        y = y.view(x_ghosts.shape).transpose(2, 3).contiguous()
        # no view to autograd: ReLU in place on a view costs backward three copies
        y = torch.ops.aten._unsafe_view(y, x.shape)
        return y, means.view(count, channels), variances.view(count, channels)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accepts any input with a channel axis 1."""


class Ghosts:
    """The sizes of a ghost batch and of the current batch, shared by a model and its norms, and the
    hooks that reorder samples."""

    def __init__(self, ghost: int) -> None:
        self.ghost = ghost
        self.samples: int | None = (
            # samples in the model's current forward pass, or in the last one, which activation
            # checkpointing repeats in backward
            None
        )

    def before_forward(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook: the first input is the batch."""
        self.samples = len(inputs[0])
        return (interleave(inputs[0], self.ghost), *inputs[1:]) if model.training else inputs

    def after_forward(
        self, model: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """A forward hook: the output has a row for each sample."""
        return deinterleave(output, self.ghost) if model.training else output


def interleave(x: torch.Tensor, ghost: int) -> torch.Tensor:
    """Orders samples as the first of every full ghost batch, then the second of every one, ...;
    samples of a smaller last ghost batch remain last."""
    return _transpose_samples(x, len(x) // ghost, ghost)


def deinterleave(x: torch.Tensor, ghost: int) -> torch.Tensor:
    """Reverses interleave()."""
    return _transpose_samples(x, ghost, len(x) // ghost)


def _transpose_samples(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns the first rows * columns samples of (n, ...), a row-major matrix, in column-major
    order; the rest is unchanged."""
    full = rows * columns
    if min(rows, columns) < 2:  # the order does not change
        return x
    head = x[:full].unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)
    return head if full == len(x) else torch.cat([head, x[full:]])


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


def orders_of_norms(model: torch.nn.Module) -> list[SameOrder]:
    return list(
        dict.fromkeys(
            module.order for module in model.modules() if isinstance(module, SyncBatchNorm)
        )
    )


def end_forward(order: SameOrder, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    """Ends the order of norms, as a forward hook of the model: from here on, a rank with fewer
    norms issues collectives of another kind."""
    if model.training:
        order.end("end of the forward pass", backward_follows=torch.is_grad_enabled())


def take_over(new: BatchNorm, old: BatchNorm) -> None:
    """Moves the parameters, buffers and training mode of `old` to `new`."""
    new.weight = old.weight
    new.bias = old.bias
    new.running_mean = old.running_mean
    new.running_var = old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    new.training = old.training


def update_running(
    norm: BatchNorm, means: torch.Tensor, variances: torch.Tensor, one_by_one: bool
) -> None:
    """Updates the running statistics with the statistics of S batches, (S, C): once with their
    mean, or once for each batch in order.

    With one update each, batch s has the final weight m (1 - m)^(S - 1 - s), and the old value (1 -
    m)^S. momentum=None is the mean over all updates so far, with equal weights.
    """
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    updates = len(means) if one_by_one else 1
    norm.num_batches_tracked += updates
    keep: float | torch.Tensor
    if one_by_one and norm.momentum is not None:
        # updates after each
        later = torch.arange(updates - 1, -1, -1, dtype=means.dtype, device=means.device)
        weights = norm.momentum * (1 - norm.momentum) ** later
        keep = (1 - norm.momentum) ** updates
    elif norm.momentum is not None:
        weights = means.new_full((len(means),), norm.momentum / len(means))
        keep = 1 - norm.momentum
    else:
        # on the device, because the host would have to wait for it
        share = updates / norm.num_batches_tracked.double()
        weights = (share / len(means)).to(means.dtype).expand(len(means))
        keep = 1 - share
    with torch.no_grad():
        norm.running_mean.mul_(keep).add_((weights.unsqueeze(1) * means).sum(0))
        norm.running_var.mul_(keep).add_((weights.unsqueeze(1) * variances).sum(0))

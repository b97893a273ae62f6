"""Which statistics the batch norms of a model use: use_norm replaces them, by ghost batch norm here or by that of torch_sync_norm.

Ghost batch norm (Hoffer 2017, arXiv:1705.08741, algorithm 1): sample i of a forward pass belongs to ghost i // g, and each ghost is
normalised by itself. A contiguous (n, C, L) tensor is, without a copy, one of (g, S C, L), which one plain kernel normalises; but its S
ghosts are then those of the samples i mod S. Hence the model deals its samples out once, at its input, such that the samples of ghost s
lie at s, s + S, s + 2 S, ..., and puts its outputs back in order: hooks on the model do both, and nobody outside sees that order.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvdtrain.comm.communicator import Communicator
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.norm.sync import SyncBatchNorm, follow, take_over

Kind = Literal["batch", "ghost", "sync"]
Statistics = Literal["averaged", "sequential"]


def deal(x: torch.Tensor, ghost: int) -> torch.Tensor:
    """The first sample of every full ghost, then the second of every full ghost, ...; those of a smaller last ghost stay last."""
    return _turn(x, len(x) // ghost, ghost)


def gather(x: torch.Tensor, ghost: int) -> torch.Tensor:
    """The reverse of deal."""
    return _turn(x, ghost, len(x) // ghost)


def _turn(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The first rows * columns samples, which lie row by row, column by column."""
    full = rows * columns
    if min(rows, columns) < 2:  # nothing changes places
        return x
    head = x[:full].unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)
    return head if full == len(x) else torch.cat([head, x[full:]])


class Ghosts:
    """The order of the samples while the model runs in training, which all its norms must know."""

    def __init__(self, ghost: int) -> None:
        self.ghost = ghost
        self.samples: int | None = None  # of the model's present forward pass, or of its last, which a checkpointed backward repeats

    def deal(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook: the first input is the batch."""
        self.samples = len(inputs[0])
        return (deal(inputs[0], self.ghost), *inputs[1:]) if model.training else inputs

    def gather(self, model: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """A forward hook: the output has a row for each sample."""
        return gather(output, self.ghost) if model.training else output


class GhostBatchNorm(_BatchNorm):
    """Batch norm over each ghost of `ghosts.ghost` samples, a smaller last one by itself; with one ghost at most it is the plain one.

    Inside the model of use_norm ghosts are contiguous samples of the batch; a layer called without it takes the samples i mod S. A sample
    may give several rows, (n T, C), if they lie together. Any memory format is right; channels_last costs a copy.
    """

    def __init__(self, norm: _BatchNorm, ghosts: Ghosts, statistics: Statistics) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta")
        take_over(self, norm)
        self.ghosts, self.statistics = ghosts, statistics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, ghost = self.ghosts.samples or len(x), self.ghosts.ghost
        if not self.training or samples <= ghost:
            return super().forward(x)
        if len(x) % samples:
            what = f"a batch norm gets {len(x)} rows from {samples} samples, so that nobody knows to which ghosts they belong"
            raise UserError(what, "norm.kind=ghost", "norm.kind=sync or norm.kind=batch")
        rows, (full, rest) = len(x) // samples, divmod(samples, ghost)
        parts = list(x.split([full * ghost * rows, rest * rows])) if rest else [x]  # even a slice of all rows would cost backward a copy
        y, means, variances = self._normalise(parts[0], full, rows)
        if rest:
            last, mean, variance = self._normalise(parts[1], 1, rows)
            y, means, variances = torch.cat([y, last]), torch.cat([means, mean]), torch.cat([variances, variance])
        follow(self, means, variances, one_by_one=self.statistics == "sequential")
        return y

    def _normalise(self, x: torch.Tensor, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x in `count` ghosts of equally many samples of `rows` rows; the mean and the unbiased variance of each ghost, (count, C)."""
        channels, plane = self.num_features, math.prod(x.shape[2:])
        if len(x) * plane == count:  # torch refuses such a batch too; here the batch may be large and only its last ghost too small
            what = f"a ghost of {len(x) // rows // count} sample has one value per channel ({tuple(x.shape)}), and so no variance"
            raise UserError(what, "norm.ghost", "a norm.ghost that divides the samples of a rank's forward pass, or leaves two over")
        x_turned = x.reshape(-1, count, rows, channels, plane).transpose(2, 3)  # (g, S, C, rows, L)
        flat = x_turned.reshape(-1, count * channels, rows * plane)  # a view of x, if it is contiguous and rows is 1
        like = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32)) if self.running_mean is None else self.running_mean
        means, variances = like.new_zeros(count * channels), like.new_zeros(count * channels)
        weight, bias = (None if p is None else p.repeat(count) for p in (self.weight, self.bias))
        y = functional.batch_norm(flat, means, variances, weight, bias, training=True, momentum=1.0, eps=self.eps)
        y = y.view(x_turned.shape).transpose(2, 3).contiguous()
        y = torch.ops.aten._unsafe_view(y, x.shape)  # no view to autograd: ReLU in place on a view costs backward three copies
        return y, means.view(count, channels), variances.view(count, channels)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """The kernel takes whatever has a channel axis 1."""


def use_norm(model: nn.Module, kind: Kind, ghost: int, statistics: Statistics, communicator: Communicator) -> nn.Module:
    """The model whose BatchNorm1d, 2d, 3d and SyncBatchNorm layers, of any depth, have become ghost or sync norms; batch: as it was.

    In place, but for a model that is itself a norm. The new layers have the weights, buffers, settings and state_dict names of the old,
    not their hooks. With ghost, call the model as model(batch, ...): its first input and its output have a row for each sample, and come
    and go in the order of the batch. With sync, every rank calls it equally often, and one without samples with a batch of none.
    """
    if kind == "batch":
        return model
    ghosts = Ghosts(ghost)
    made: dict[nn.Module, nn.Module] = {}
    for name, norm in model.named_modules():  # a layer in two places appears once
        if isinstance(norm, _BatchNorm):
            check(norm, name, kind)
            made[norm] = GhostBatchNorm(norm, ghosts, statistics) if kind == "ghost" else SyncBatchNorm(norm, communicator, name or "model")
    if not made:
        raise UserError("the model has no batch norm layer whose statistics could be chosen", f"norm.kind={kind}", "norm.kind=batch")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in made:
                setattr(parent, name, made[child])
    model = made.get(model, model)
    if kind == "ghost":
        model.register_forward_pre_hook(ghosts.deal)
        model.register_forward_hook(ghosts.gather)
    return model


def check(norm: _BatchNorm, name: str, kind: Kind) -> None:
    """Refuses a layer that would lose something by the change."""
    layer, where = f"{name or 'the model'} ({type(norm).__name__})", f"norm.kind={kind}"
    if isinstance(norm, LazyModuleMixin):
        raise UserError(f"{layer} does not know its number of channels yet", where, "give it: nn.BatchNorm2d(64), not nn.LazyBatchNorm2d()")
    if type(norm).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise UserError(f"{layer} computes in its own way, which {kind} would drop", where, "norm.kind=batch, or torch's own BatchNorm")

"""norm.kind: use_norm() replaces a model's batch norms, by the ghost batch norm of this file or by the SyncBatchNorm of norm/sync.py.

Ghost batch norm (Hoffer 2017, arXiv:1705.08741, algorithm 1): sample i of a forward pass belongs to ghost i // g, and each ghost is
normalised by itself. A contiguous (n, C, L) tensor is, without a copy, one of (g, S C, L), which one plain kernel normalises; but its S
ghosts are then those of the samples i mod S. So the model's input is interleaved once, such that the samples of ghost s are at s, s + S,
s + 2 S, ..., and its output is put back in order. Hooks on the model do both: callers see the order of the batch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvdtrain.comm.communicator import Communicator
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.norm.sync import SyncBatchNorm, end_forward, order_of_norms, take_over, update_running

Kind = Literal["batch", "ghost", "sync"]
Statistics = Literal["averaged", "sequential"]


def interleave(x: torch.Tensor, ghost: int) -> torch.Tensor:
    """The first sample of every full ghost, then the second of every full ghost, ...; those of a smaller last ghost stay last."""
    return _transpose_samples(x, len(x) // ghost, ghost)


def deinterleave(x: torch.Tensor, ghost: int) -> torch.Tensor:
    """The reverse of interleave()."""
    return _transpose_samples(x, ghost, len(x) // ghost)


def _transpose_samples(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The first rows * columns samples of (n, ...), a matrix in row-major order, in column-major order; the rest as it is."""
    full = rows * columns
    if min(rows, columns) < 2:  # the order is the same
        return x
    head = x[:full].unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)
    return head if full == len(x) else torch.cat([head, x[full:]])


class Ghosts:
    """The size of a ghost and of the present batch, which a model shares with all its norms; and the hooks that reorder samples."""

    def __init__(self, ghost: int) -> None:
        self.ghost = ghost
        self.samples: int | None = (
            None  # of the model's present forward pass, or of its last, which activation checkpointing repeats in backward
        )

    def before_forward(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook: the first input is the batch."""
        self.samples = len(inputs[0])
        return (interleave(inputs[0], self.ghost), *inputs[1:]) if model.training else inputs

    def after_forward(self, model: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """A forward hook: the output has a row for each sample."""
        return deinterleave(output, self.ghost) if model.training else output


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
        """x (n, C, ...), normalized. Raises UserError where the rows of x do not split evenly among the samples."""
        samples, ghost = self.ghosts.samples or len(x), self.ghosts.ghost
        if not self.training or samples <= ghost:
            return super().forward(x)
        if len(x) % samples:
            what = f"a batch norm gets {len(x)} rows from {samples} samples, so it cannot be split into ghosts"
            raise UserError(what, "norm.kind=ghost", "norm.kind=sync or norm.kind=batch")
        rows = len(x) // samples
        full, rest = divmod(samples, ghost)  # ghosts, samples of a smaller last one
        if not rest:  # even a slice of all rows would cost backward a copy
            y, means, variances = self._normalise(x, full, rows)
        else:
            x_full, x_rest = x.split([full * ghost * rows, rest * rows])
            y_full, means_full, variances_full = self._normalise(x_full, full, rows)
            y_rest, mean_rest, variance_rest = self._normalise(x_rest, 1, rows)
            y, means = torch.cat([y_full, y_rest]), torch.cat([means_full, mean_rest])
            variances = torch.cat([variances_full, variance_rest])
        update_running(self, means, variances, one_by_one=self.statistics == "sequential")
        return y

    def _normalise(self, x: torch.Tensor, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x in `count` ghosts of equally many samples of `rows` rows; the mean and the unbiased variance of each ghost, (count, C)."""
        channels, plane = self.num_features, math.prod(x.shape[2:])
        if len(x) * plane == count:  # torch refuses such a batch too; here the batch may be large and only its last ghost too small
            what = f"a ghost of {len(x) // rows // count} sample has one value per channel ({tuple(x.shape)}), and so no variance"
            raise UserError(what, "norm.ghost", "a norm.ghost that divides the samples of a rank's forward pass, or leaves two over")
        x_ghosts = x.reshape(-1, count, rows, channels, plane).transpose(2, 3)  # (g, S, C, rows, L)
        flat = x_ghosts.reshape(-1, count * channels, rows * plane)  # a view of x, if it is contiguous and rows is 1
        like = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32)) if self.running_mean is None else self.running_mean
        means, variances = like.new_zeros(count * channels), like.new_zeros(count * channels)
        weight, bias = (None if p is None else p.repeat(count) for p in (self.weight, self.bias))
        y = functional.batch_norm(flat, means, variances, weight, bias, training=True, momentum=1.0, eps=self.eps)
        y = y.view(x_ghosts.shape).transpose(2, 3).contiguous()
        y = torch.ops.aten._unsafe_view(y, x.shape)  # no view to autograd: ReLU in place on a view costs backward three copies
        return y, means.view(count, channels), variances.view(count, channels)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """The kernel takes whatever has a channel axis 1."""


def use_norm(model: nn.Module, kind: Kind, ghost: int, statistics: Statistics, communicator: Communicator) -> nn.Module:
    """Replaces BatchNorm1d, 2d, 3d and SyncBatchNorm layers, at any depth, by ghost or sync norms; with kind=batch by nothing.

    In place, except for a model that is itself a norm. The new layers have the weights, buffers, settings and state_dict names of the old,
    not their hooks. With ghost, call the model as model(batch, ...): its first input and its output have a row for each sample, in the
    order of the batch. With sync, every rank calls it equally often, a rank without samples with an empty batch.

    Raises UserError where the model has no such layer, or one that cannot be replaced.
    """
    if kind == "batch":
        return model
    ghosts, order = Ghosts(ghost), order_of_norms(communicator)
    replacements: dict[nn.Module, nn.Module] = {}
    for name, norm in model.named_modules():  # a layer in two places appears once
        if isinstance(norm, _BatchNorm):
            check_replaceable(norm, name, kind)
            if kind == "ghost":
                replacements[norm] = GhostBatchNorm(norm, ghosts, statistics)
            else:
                replacements[norm] = SyncBatchNorm(norm, communicator, name or "model", order)
    if not replacements:
        raise UserError("the model has no batch norm layer whose statistics could be chosen", f"norm.kind={kind}", "norm.kind=batch")
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


def check_replaceable(norm: _BatchNorm, name: str, kind: Kind) -> None:
    """Raises UserError for a layer that would lose something by the replacement."""
    layer, where = f"{name or 'the model'} ({type(norm).__name__})", f"norm.kind={kind}"
    if isinstance(norm, LazyModuleMixin):
        raise UserError(f"{layer} does not know its number of channels yet", where, "give it: nn.BatchNorm2d(64), not nn.LazyBatchNorm2d()")
    if type(norm).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise UserError(f"{layer} computes in its own way, which {kind} would drop", where, "norm.kind=batch, or torch's own BatchNorm")

"""norm.kind=ghost: batch norm over groups of the samples in a rank's forward pass."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.errors import UserError
from hvdtrain.extras.batch_norms.running import take_over, update_running
from hvdtrain.frameworks.torch.private_api import BatchNorm

Statistics = Literal["averaged", "sequential"]


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

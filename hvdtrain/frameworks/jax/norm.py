"""Batch norm in JAX, by norm.kind: over a rank's samples, over ghosts of them, or over the samples
of all ranks; torch's numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.sections.norm import NormConfig
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import Flow, Params

# as in torch.nn.BatchNorm2d
EPS = 1e-5
MOMENTUM = 0.1


class Statistics(NamedTuple):
    """The statistics of a norm in one pass, for one batch or several ghost batches."""

    means: jax.Array  # (S, C)
    variances: jax.Array  # (S, C), unbiased
    count: Any  # how many of the S have samples


class BatchNorms:
    """The batch norms of a model, whose statistics norm.kind chooses."""

    def __init__(
        self, norm: NormConfig, layers: Mapping[str, int], communicator: Communicator
    ) -> None:
        """layers: name -> channels. Raises UserError if norm.kind is set and the model has no
        norms."""
        if norm.kind != "batch" and not layers:
            raise UserError(
                "the model has no batch norm layer, so norm.kind has no effect",
                f"norm.kind={norm.kind}",
                "norm.kind=batch",
            )
        self.layers = layers
        self.ranks = (
            NormRanks(communicator) if norm.kind == "sync" and communicator.size > 1 else None
        )
        self.ghost = norm.ghost if norm.kind == "ghost" else None
        self.one_by_one = norm.statistics == "sequential"
        # fewest values of a channel in one sample over all layers; known after a pass was traced
        self.least_values = 2**31

    def start(self) -> dict[str, np.ndarray]:
        """Returns the buffers of all norms before the first step."""
        buffers = {}
        for name, channels in self.layers.items():
            buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"] = (
                np.zeros(channels),
                np.ones(channels),
            )
            buffers[f"{name}.num_batches_tracked"] = np.zeros((), np.int32)
        return buffers

    def takes(self, samples: int) -> bool:
        """Whether each ghost batch of `samples` has a variance; with synchronized norms that
        depends on the other ranks."""
        last = (
            samples % self.ghost or self.ghost if self.ghost and samples > self.ghost else samples
        )
        return self.ranks is not None or min(last, self.ghost or last) * self.least_values > 1

    def check(self, samples: int) -> None:
        """Raises UserError if takes() is false."""
        if self.takes(samples):
            return
        if self.ghost and samples > self.ghost:
            what = "a ghost batch of 1 sample has one value per channel, and therefore no variance"
            raise UserError(
                what,
                "norm.ghost",
                "a norm.ghost that divides the samples of a rank's forward pass, or leaves a "
                "remainder of at least two",
            )
        what = "a micro-batch has one sample, so batch norm cannot compute its variance"
        raise UserError(
            what,
            "a step in training",
            "a larger batch.size, data.sampling=global, or norm.kind=sync",
        )

    def of_pass(self, samples: Any, training: bool) -> Norms:
        return Norms(self, samples, training)


class Norms:
    """The batch norms in one pass of a model, which calls each as norms(params, name, flow)."""

    def __init__(self, rule: BatchNorms, samples: Any, training: bool) -> None:
        """samples: the number of rows without padding."""
        self._rule = rule
        self._samples = samples
        self._training = training

    def begin(self, x: jax.Array) -> Flow:
        return Flow(x, {}, jnp.zeros((), jnp.float32))

    def __call__(self, params: Params, name: str, flow: Flow) -> Flow:
        """Returns x (rows, ..., C), normalized, scaled and shifted; in training the flow contains
        the norm's new buffers."""
        x = flow.x
        weight = params[f"{name}.weight"]
        bias = params[f"{name}.bias"]
        self._rule.least_values = min(self._rule.least_values, x[0].size // x.shape[-1])
        if not self._training:
            mean = params[f"{name}.running_mean"]
            variance = params[f"{name}.running_var"]
            return flow._replace(x=(x - mean) * jax.lax.rsqrt(variance + EPS) * weight + bias)
        turn = flow.turn
        if self._rule.ranks is None:
            y, statistics = over_ghosts(x, weight, bias, self._samples, self._rule.ghost or len(x))
        else:
            y, turn, mean, variance = _over_ranks(
                self._rule.ranks, name, x, weight, bias, turn, self._samples
            )
            statistics = Statistics(mean[None], variance[None], 1)
        changed = _updated(params, name, jax.lax.stop_gradient(statistics), self._rule.one_by_one)
        return Flow(y, flow.buffers | changed, turn)


def over_ghosts(
    x: jax.Array, weight: jax.Array, bias: jax.Array, samples: Any, ghost: int
) -> tuple[jax.Array, Statistics]:
    """Normalizes over ghost batches: sample i belongs to ghost i // `ghost`; rows from `samples` on
    are excluded from statistics.

    Hoffer 2017, arXiv:1705.08741, algorithm 1.
    """
    rows = len(x)
    channels = x.shape[-1]
    ghost = min(ghost, rows)
    count = -(-rows // ghost)
    padded = jnp.pad(x, ((0, count * ghost - rows), *((0, 0),) * (x.ndim - 1)))
    parts = padded.reshape(count, ghost, -1, channels)  # (S, g, L, C)
    real = (jnp.arange(count * ghost) < samples).reshape(count, ghost, 1, 1)
    values = (real.sum((1, 2)) * parts.shape[2]).astype(x.dtype)  # (S, 1)
    means = jnp.where(real, parts, 0.0).sum((1, 2)) / jnp.maximum(values, 1.0)
    centred = parts - means[:, None, None]
    variances = jnp.where(real, jnp.square(centred), 0.0).sum((1, 2)) / jnp.maximum(values, 1.0)
    y = centred * jax.lax.rsqrt(variances + EPS)[:, None, None] * weight + bias
    unbiased = variances * (values / jnp.maximum(values - 1.0, 1.0))
    return y.reshape(padded.shape)[:rows], Statistics(means, unbiased, -(-samples // ghost))


def _updated(params: Params, name: str, statistics: Statistics, one_by_one: bool) -> Params:
    """Returns the norm's buffers after the pass: updated once with the mean over its ghost batches,
    or with each in order."""
    means, variances, count = statistics
    number = jnp.arange(len(means))
    if one_by_one:
        later = jnp.maximum(count - 1 - number, 0).astype(means.dtype)  # updates after each
        weights = MOMENTUM * (1.0 - MOMENTUM) ** later
    else:
        weights = jnp.broadcast_to(MOMENTUM / jnp.asarray(count, means.dtype), number.shape)
    keep = (1.0 - MOMENTUM) ** jnp.asarray(count if one_by_one else 1, means.dtype)
    weights = jnp.where(number < count, weights, 0.0)[:, None]
    tracked = params[f"{name}.num_batches_tracked"]
    return {
        f"{name}.running_mean": keep * params[f"{name}.running_mean"] + (weights * means).sum(0),
        f"{name}.running_var": keep * params[f"{name}.running_var"] + (weights * variances).sum(0),
        f"{name}.num_batches_tracked": tracked
        + jnp.asarray(count if one_by_one else 1, tracked.dtype),
    }


class NormRanks:
    """The collectives of synchronized norms, called by compiled passes while the host's main thread
    waits for the pass.

    An error in a collective would lose its type in JAX. So it is stored, later norms do nothing,
    and raise_error() raises it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._error: BaseException | None = None

    def spread(self, name: str, row: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gathers each rank's row, (size, n); also returns `turn`, which orders the next collective
        after this one on every rank."""
        shape = (self._communicator.size, *row.shape)
        return self._called(
            functools.partial(self._spread, f"sync_norm.{name}.forward"), shape, row, turn
        )

    def add(self, name: str, sums: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the sum over ranks, (n,), and `turn`."""
        return self._called(
            functools.partial(self._add, f"sync_norm.{name}.backward"), sums.shape, sums, turn
        )

    def raise_error(self) -> None:
        """Raises the error of a collective in completed passes."""
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _called(
        self, call: Any, shape: tuple[int, ...], x: jax.Array, turn: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Passes numbers as 32-bit words, because in its callback thread JAX would round float64 to
        float32."""
        # (..., 2) of float64
        dtype = np.dtype(x.dtype)
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        results = (
            jax.ShapeDtypeStruct((*shape, *words.shape[x.ndim :]), words.dtype),
            jax.ShapeDtypeStruct((), turn.dtype),
        )

        def collective(words: jax.Array, turn: jax.Array) -> tuple[np.ndarray, np.ndarray]:
            found = np.zeros(shape, dtype)
            try:
                if self._error is None:
                    found = call(np.array(words).view(dtype).reshape(x.shape))
            except BaseException as error:
                self._error = error
            return np.ascontiguousarray(found).view(np.uint32).reshape(results[0].shape), np.zeros(
                (), np.float32
            )

        found, turn = jax.pure_callback(collective, results, words, turn)
        return jax.lax.bitcast_convert_type(found, dtype), turn

    def _spread(self, name: str, row: np.ndarray) -> np.ndarray:
        rows = np.zeros((self._communicator.size, len(row)), row.dtype)
        rows[self._communicator.rank] = row
        rows = self._communicator.start_spread(rows, name).wait()
        if rows[:, 0].sum() <= 1:
            what = (
                "a micro-batch has one sample on all ranks together, so synchronized batch norm "
                "cannot compute its variance"
            )
            raise UserError(what, "a step in training", "a larger batch.size, or norm.kind=batch")
        return rows

    def _add(self, name: str, sums: np.ndarray) -> np.ndarray:
        total: np.ndarray = self._communicator.allreduce(sums, name)
        return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_ranks(
    ranks: NormRanks,
    name: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    turn: jax.Array,
    samples: Any,
) -> tuple[jax.Array, ...]:
    """Returns y, turn, mean and unbiased variance (C,) over the samples of all ranks; a rank's
    share may be empty."""
    return _forward(ranks, name, x, weight, bias, turn, samples)[0]


def _forward(
    ranks: NormRanks,
    name: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    turn: jax.Array,
    samples: Any,
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    """Combines counts, means and variances of the ranks in one collective (Chan, Golub, LeVeque
    1979, eq. 2.1), like torch's SyncBatchNorm."""
    _, own = over_ghosts(x, weight, bias, samples, len(x))
    values = jnp.asarray(samples * (x[0].size // x.shape[-1]), x.dtype)
    biased = own.variances[0] * (jnp.maximum(values - 1.0, 1.0) / jnp.maximum(values, 1.0))
    rows, turn = ranks.spread(name, jnp.concatenate([values[None], own.means[0], biased]), turn)
    # (size, 1), (size, C), (size, C)
    counts, means, variances = jnp.split(rows, [1, 1 + x.shape[-1]], axis=1)
    total = counts.sum()
    mean = (counts / total * means).sum(0)
    variance = (counts / total * (variances + jnp.square(means - mean))).sum(0)
    y = (x - mean) * jax.lax.rsqrt(variance + EPS) * weight + bias
    return (y, turn, mean, variance * (total / (total - 1.0))), (
        x,
        weight,
        mean,
        variance,
        total,
        samples,
    )


def _backward(
    ranks: NormRanks, name: str, kept: tuple[Any, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    """Computes dx = w / sqrt(var + eps) (dy - sum(dy) / N - xhat sum(dy xhat) / N) over all N
    values, and this rank's part of the gradients of weight and bias."""
    x, weight, mean, variance, total, samples = kept
    dy, turn, *_ = cotangents
    axes = tuple(range(x.ndim - 1))
    slope = jax.lax.rsqrt(variance + EPS)
    normalized = (x - mean) * slope
    dw = (dy * normalized).sum(axes)
    db = dy.sum(axes)
    sums, turn = ranks.add(name, jnp.concatenate([dw, db]), turn)
    dw_mean, db_mean = jnp.split(sums / total, 2)
    real = (jnp.arange(len(x)) < samples).reshape(-1, *(1,) * (x.ndim - 1))
    dx = weight * slope * (dy - jnp.where(real, db_mean + normalized * dw_mean, 0.0))
    return dx, dw, db, turn, None


_over_ranks.defvjp(_forward, _backward)

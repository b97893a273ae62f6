"""The arithmetic of one step as pure functions of weights and batches, which the JAX framework compiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.jax.model import Model, key_of
from hvdtrain.frameworks.learner import Task
from hvdtrain.optim.clipping import clip
from hvdtrain.optim.rule import ArrayOps, Rule, is_excluded

Weights = list[jax.Array]  # in the order of Model.names
OptimizerState = list[tuple[Any, ...]]  # of each parameter, in the same order


class DeviceBatch(NamedTuple):
    """A micro-batch on the device: n samples, then padding, whose weight is 0. Without samples it has no arrays."""

    n: int
    images: jax.Array | None = None  # uint8 (rows, H, W, C), augmented
    labels: jax.Array | None = None  # int32 (rows,)
    weights: jax.Array | None = None  # (rows,) factors of the samples' losses
    partner_labels: jax.Array | None = None  # int32 (rows,), of the images mixed in (mixup)
    mixup_weight: jax.Array | None = None  # (rows,) of `labels` in the loss


class Formulas:
    """Loss, gradient and update. Batches that reach them have samples."""

    def __init__(self, config: Config, model: Model, rule: Rule, task: Task, ranks: int) -> None:
        self.model, self.rule, self.optim, self.task, self.ranks = model, rule, config.optim, task, ranks
        self.skips = config.guard.nonfinite == "skip"
        self.squared_error, self.smoothing = config.model.loss == "squared_error", config.model.label_smoothing

    def sums(self, weights: Weights, batch: DeviceBatch) -> Sums:
        """Loss without label smoothing, and hits."""
        return _sums(*self._forward(weights, batch, 0.0), batch.n)

    def gradient(self, weights: Weights, batch: DeviceBatch, global_batch: int) -> tuple[jax.Array, Sums]:
        """The gradients of all parameters in one row, of the sum of losses over `global_batch`; and the sums.

        The row is NaN where the loss is not finite: the reduction brings that to every rank.
        """
        assert batch.weights is not None
        sample_weights = batch.weights

        def mean(weights: Weights) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            losses, right = self._forward(weights, batch, self.smoothing)
            return (losses * sample_weights).sum() / global_batch, (losses, right)  # a sum over ranks is the mean over the global batch

        gradients, (losses, right) = jax.grad(mean, has_aux=True)(weights)
        row, sums = jnp.concatenate([g.ravel() for g in gradients]), _sums(losses, right, batch.n)
        return jnp.where(jnp.isfinite(sums["loss"] * sample_weights).all(), row, jnp.nan), sums

    def start(self, weights: Weights) -> OptimizerState:
        """The state of every parameter before the first step."""
        return [self._rule_of(p).init(p, ArrayOps(jnp)) for p in weights]

    def update(
        self, weights: Weights, optimizer_state: OptimizerState, row: Any, hyper: Hyper, key: Any, noisy: bool
    ) -> tuple[Weights, OptimizerState, jax.Array]:
        """One step of all parameters along the mean gradient over all ranks, and this rank's part of "nonfinite".

        `noisy` is a constant of the compiled function.
        """
        bad = ~jnp.isfinite(row).all()
        gradients = clip(_split(row, weights), self.optim.clip_norm, self.optim.clip_value, jnp)
        if noisy:
            noise = jnp.sqrt(hyper.noise) * jax.random.normal(key_of(key), row.shape, row.dtype)
            gradients = [g + part for g, part in zip(gradients, _split(noise, weights), strict=True)]
        new_weights: Weights = []
        new_states: OptimizerState = []
        for g, state, p in zip(gradients, optimizer_state, weights, strict=True):
            h = hyper._replace(weight_decay=0.0) if self._is_excluded(p) else hyper
            new_p, new_state = self._rule_of(p).update(g, state, p, h, ArrayOps(jnp))
            new_weights.append(new_p.astype(p.dtype))  # the dtypes stay as they were, or the next step would be compiled again
            new_states.append(tuple(jnp.asarray(new).astype(old.dtype) for new, old in zip(new_state, state, strict=True)))
        if self.skips:
            keep_if_bad = functools.partial(jnp.where, bad)
            new_weights, new_states = jax.tree.map(keep_if_bad, (weights, optimizer_state), (new_weights, new_states))
        return new_weights, new_states, bad.astype(weights[0].dtype) / self.ranks

    def _is_excluded(self, p: jax.Array) -> bool:
        return self.optim.exclude == "norms_and_biases" and is_excluded(p.shape)

    def _rule_of(self, p: jax.Array) -> Rule:
        return self.rule.without_trust_ratio() if self._is_excluded(p) else self.rule

    def _forward(self, weights: Weights, batch: DeviceBatch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        """Loss of each row, and whether its label is the largest logit, (rows,) each."""
        assert batch.images is not None and batch.labels is not None
        labels: jax.Array = batch.labels
        dtype = weights[0].dtype
        mean, std = jnp.asarray(self.task.mean, dtype), jnp.asarray(self.task.std, dtype)
        logits = self.model.logits(weights, (batch.images.astype(dtype) / 255.0 - mean) / std)
        each = self._losses(logits, labels, smoothing)
        if batch.mixup_weight is not None:
            each = batch.mixup_weight * each + (1.0 - batch.mixup_weight) * self._losses(logits, batch.partner_labels, smoothing)
        return each, logits.argmax(1) == labels

    def _losses(self, logits: jax.Array, labels: Any, smoothing: float) -> jax.Array:
        target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
        target = target * (1.0 - smoothing) + smoothing / logits.shape[1]  # Szegedy et al. 2015, arXiv:1512.00567, section 7
        each = 0.5 * jnp.square(logits - target) if self.squared_error else -target * jax.nn.log_softmax(logits)
        return each.sum(1)


def _split(row: Any, weights: Weights) -> list[jax.Array]:
    """The row as an array for each parameter, in its shape."""
    cuts = np.cumsum([p.size for p in weights])[:-1]
    return [part.reshape(p.shape) for part, p in zip(jnp.split(row, cuts), weights, strict=True)]


def _sums(losses: jax.Array, right: jax.Array, samples: Any) -> Sums:
    """Over the samples, whatever their weight, without the padding."""
    real = jnp.arange(len(losses)) < samples
    return {"loss": jnp.where(real, losses, 0.0).sum(), "right": (right & real).sum().astype(losses.dtype)}

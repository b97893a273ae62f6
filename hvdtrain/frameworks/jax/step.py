"""The numbers of one step as pure functions of weights and batches, which the JAX framework compiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.jax.model import Model, key_of
from hvdtrain.frameworks.learner import Task
from hvdtrain.optim.clipping import clip
from hvdtrain.optim.rule import ArrayOps, Rule, is_excluded

Weights = list[jax.Array]  # in the order of Model.names
Slots = list[tuple[Any, ...]]  # of each parameter


class Formulas:
    """A batch is {"x": uint8 (rows, H, W, C), "y", "w": (rows,), "n"}: n samples, then padding, whose weight "w" is 0.

    A mixed batch has "y2", "share": (rows,) too: the partners' labels, and the share of "y" in each loss.
    """

    def __init__(self, config: Config, model: Model, rule: Rule, task: Task, ranks: int) -> None:
        self.model, self.rule, self.optim, self.task, self.ranks = model, rule, config.optim, task, ranks
        self.skips = config.guard.nonfinite == "skip"
        self.squared_error, self.smoothing = config.model.loss == "squared_error", config.model.label_smoothing

    def sums(self, weights: Weights, batch: Batch) -> Sums:
        """Loss without label smoothing, and hits."""
        return _sums(*self._forward(weights, batch, 0.0), batch["n"])

    def gradient(self, weights: Weights, batch: Batch, whole: int) -> tuple[jax.Array, Sums]:
        """The gradients of all parameters in one row, of the sum of losses over `whole`, the samples of all ranks; and the sums.

        A row of NaN where the loss is not finite, so that every rank knows after the reduction.
        """

        def mean(weights: Weights) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            losses, right = self._forward(weights, batch, self.smoothing)
            return (losses * batch["w"]).sum() / whole, (losses, right)  # a sum over ranks is the mean over the global batch

        gradients, (losses, right) = jax.grad(mean, has_aux=True)(weights)
        row, sums = jnp.concatenate([g.ravel() for g in gradients]), _sums(losses, right, batch["n"])
        return jnp.where(jnp.isfinite(sums["loss"] * batch["w"]).all(), row, jnp.nan), sums

    def start(self, weights: Weights) -> Slots:
        """The slots of every parameter before the first step."""
        return [self._rule_of(p).init(p, ArrayOps(jnp)) for p in weights]

    def update(
        self, weights: Weights, optimizer_state: Slots, row: Any, hyper: Hyper, key: Any, noisy: bool
    ) -> tuple[Weights, Slots, jax.Array]:
        """One step of all parameters along the mean gradient over all ranks, and this rank's part of "nonfinite".

        `noisy` is a constant of the compiled function.
        """
        bad = ~jnp.isfinite(row).all()
        gradients = clip(_parts(row, weights), self.optim.clip_norm, self.optim.clip_value, jnp)
        if noisy:
            noise = jnp.sqrt(hyper.noise) * jax.random.normal(key_of(key), row.shape, row.dtype)
            gradients = [g + part for g, part in zip(gradients, _parts(noise, weights), strict=True)]
        moved: Weights = []
        remembered: Slots = []
        for g, slot, p in zip(gradients, optimizer_state, weights, strict=True):
            h = hyper._replace(weight_decay=0.0) if self._is_excluded(p) else hyper
            new, kept = self._rule_of(p).update(g, slot, p, h, ArrayOps(jnp))
            moved.append(new.astype(p.dtype))  # keeps the types as they were, or the next step would be compiled anew
            remembered.append(tuple(jnp.asarray(a).astype(b.dtype) for a, b in zip(kept, slot, strict=True)))
        if self.skips:
            moved, remembered = jax.tree.map(lambda old, new: jnp.where(bad, old, new), (weights, optimizer_state), (moved, remembered))
        return moved, remembered, bad.astype(weights[0].dtype) / self.ranks

    def _is_excluded(self, p: jax.Array) -> bool:
        return self.optim.exclude == "norms_and_biases" and is_excluded(p.shape)

    def _rule_of(self, p: jax.Array) -> Rule:
        return self.rule.without_trust_ratio() if self._is_excluded(p) else self.rule

    def _forward(self, weights: Weights, batch: Batch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        """Loss and hit of each row, (rows,)."""
        dtype = weights[0].dtype
        mean, std = jnp.asarray(self.task.mean, dtype), jnp.asarray(self.task.std, dtype)
        logits = self.model.logits(weights, (batch["x"].astype(dtype) / 255.0 - mean) / std)
        each = self._losses(logits, batch["y"], smoothing)
        if "share" in batch:
            each = batch["share"] * each + (1.0 - batch["share"]) * self._losses(logits, batch["y2"], smoothing)
        return each, logits.argmax(1) == batch["y"]

    def _losses(self, logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
        label = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
        label = label * (1.0 - smoothing) + smoothing / logits.shape[1]  # Szegedy et al. 2015, arXiv:1512.00567, section 7
        each = 0.5 * jnp.square(logits - label) if self.squared_error else -label * jax.nn.log_softmax(logits)
        return each.sum(1)


def _parts(row: Any, weights: Weights) -> list[jax.Array]:
    """The row cut into an array for each parameter."""
    cuts = np.cumsum([p.size for p in weights])[:-1]
    return [part.reshape(p.shape) for part, p in zip(jnp.split(row, cuts), weights, strict=True)]


def _sums(losses: jax.Array, right: jax.Array, samples: Any) -> Sums:
    """Over the samples, whatever their weight, without the padding."""
    real = jnp.arange(len(losses)) < samples
    return {"loss": jnp.where(real, losses, 0.0).sum(), "right": (right & real).sum().astype(losses.dtype)}

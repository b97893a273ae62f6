"""Loss and gradient of one micro-batch, as pure functions of weights and batches, which the JAX framework compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hvdtrain.core.metrics import Sums
from hvdtrain.data.images.views import Views
from hvdtrain.frameworks.jax.model import Model
from hvdtrain.tasks.task import Each, Part

Weights = list[jax.Array]  # in the order of Model.names


class DeviceBatch(NamedTuple):
    """A micro-batch on the device: n samples, then padding, whose weight "w" is 0. Without samples it has no arrays."""

    n: int
    weight: int = 0  # of Task.weight()
    # (rows, ...) each: the fields, augmented, images as uint8, other integers as int32; "w" of the samples' losses; "mixup_weight" of a
    # sample in its mixture, and the fields of its partner, as "partner_y"
    arrays: dict[str, jax.Array] = {}  # noqa: RUF012 (never written)


class Formulas:
    """Loss and gradient. Batches that reach them have samples."""

    def __init__(self, model: Model, part: Part, views: Views) -> None:
        self.model, self.part, self.views = model, part, views

    def sums(self, weights: Weights, batch: DeviceBatch) -> Sums:
        """In evaluation."""
        return _sums(self.part.each(self.outputs(weights, batch), batch.arrays, False), batch.n)

    def outputs(self, weights: Weights, batch: DeviceBatch) -> jax.Array:
        """(rows, ...) of the model in evaluation: the mean over the views of each sample."""
        outputs: jax.Array = self.views.mean(batch.arrays, lambda arrays: self._outputs(weights, arrays), jnp)
        return outputs

    def gradient(self, weights: Weights, batch: DeviceBatch, divisor: int) -> tuple[jax.Array, Sums]:
        """The gradients of all parameters in one row, of the sum of losses over `divisor`; and the sums.

        The row is NaN where the loss is not finite: the reduction brings that to every rank.
        """
        sample_weights = batch.arrays["w"]

        def mean(weights: Weights) -> tuple[jax.Array, Each]:
            each = self.part.each(self._outputs(weights, batch.arrays), batch.arrays, True)
            return (each.loss * sample_weights).sum() / divisor, each  # a sum over ranks is the mean over the global batch

        gradients, each = jax.grad(mean, has_aux=True)(weights)
        row, sums = jnp.concatenate([g.ravel() for g in gradients]), _sums(each, batch.n)
        return jnp.where(jnp.isfinite(sums["loss"] * sample_weights).all(), row, jnp.nan), sums

    def _outputs(self, weights: Weights, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Outputs for each row as it is."""
        return self.model.outputs(weights, self.part.inputs(arrays))


def _sums(each: Each, samples: Any) -> Sums:
    """Over the samples, whatever their weight, without the padding."""
    real = jnp.arange(len(each.loss)) < samples

    def total(term: jax.Array) -> jax.Array:
        mask = real.reshape(-1, *(1,) * (term.ndim - 1))
        return jnp.where(mask, term, jnp.zeros((), term.dtype)).sum(0).astype(each.loss.dtype)

    return {"loss": jnp.where(real, each.loss, 0.0).sum(), **{name: total(term) for name, term in each.terms.items()}}

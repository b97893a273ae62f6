"""Classification in JAX: the loss of each sample, as in torch.py. What is here is compiled."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hvdtrain.tasks.inputs.jax import JaxInputs
from hvdtrain.tasks.task import Each

Arrays = Mapping[str, jax.Array]


class JaxClassification:
    """Images are uint8 (n, H, W, C), other numbers (n, ...); logits (n, outputs), at least one for each class."""

    where = staticmethod(jnp.where)  # of this framework

    def __init__(self, inputs: JaxInputs, *, squared_error: bool, smoothing: float, turned: bool) -> None:
        self._inputs, self._squared_error, self._smoothing = inputs, squared_error, smoothing
        self._turned = turned  # whether images of floats (n, C, H, W) become (n, H, W, C)

    def inputs(self, batch: Arrays) -> jax.Array:
        x = self._inputs(batch["x"])
        return x.transpose(0, 2, 3, 1) if self._turned else x

    def each(self, outputs: jax.Array, batch: Arrays, training: bool) -> Each:
        loss = self._of_labels(outputs, batch["y"], training)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"]
            loss = weight * loss + (1.0 - weight) * self._of_labels(outputs, batch["partner_y"], training)
        return Each(loss, {"right": outputs.argmax(1) == batch["y"]})

    def _of_labels(self, logits: jax.Array, labels: jax.Array, training: bool) -> jax.Array:
        smoothing = self._smoothing if training else 0.0
        target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
        target = target * (1.0 - smoothing) + smoothing / logits.shape[1]  # Szegedy et al. 2015, arXiv:1512.00567, section 7
        each = 0.5 * jnp.square(logits - target) if self._squared_error else -target * jax.nn.log_softmax(logits)
        return each.sum(1)

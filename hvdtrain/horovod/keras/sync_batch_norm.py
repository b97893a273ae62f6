"""SyncBatchNormalization: batch norm by the mean and variance of the samples of all ranks, on each
backend of Keras."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.horovod.call import Sum
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.traced.collectives import allreduce


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm like keras.layers.BatchNormalization, with statistics over the samples of all
    ranks in training.

    Ranks may have batches of different sizes, or none: each sample counts once, while Horovod
    averages the statistics of ranks. Every rank must call the same of these layers in the same
    order. Forward and backward are two allreduces each, of at most 2 x channels numbers.
    """

    def __init__(self, fused: bool | None = False, **of_keras: Any) -> None:
        """Raises BadCall for arguments that would use the statistics of one rank."""
        if fused is not False or of_keras.get("synchronized"):
            what = (
                "SyncBatchNormalization does not support fused=True"
                if fused is not False
                else "synchronized=True belongs to tf.distribute"
            )
            raise BadCall(what, "hvd.SyncBatchNormalization()", "the call without it")
        super().__init__(**of_keras)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Returns mean and variance (C,), for inputs (..., C, ...) in float32 or float64. mask: the
        inputs' shape without its last axis."""
        if JOB.engine.size == 1:
            moments: tuple[Any, Any] = super()._moments(inputs, mask)
            return moments
        ops = keras.ops
        axes = self._reduction_axes
        counts = (
            ops.ones_like(inputs)
            if mask is None
            else ops.cast(ops.broadcast_to(mask[..., None], ops.shape(inputs)), inputs.dtype)
        )
        count, total = self._summed("mean", ops.sum(counts, axes), ops.sum(inputs * counts, axes))
        count = count if mask is None else count + keras.config.epsilon()  # as in Keras
        mean = total / count
        per_channel = [1] * len(inputs.shape)
        per_channel[self.axis] = -1
        apart = (inputs - ops.reshape(mean, per_channel)) * counts
        (squares,) = self._summed("variance", ops.sum(ops.square(apart), axes))
        return mean, squares / count

    def _summed(self, what: str, *sums: Any) -> list[Any]:
        """Sums each tensor over ranks; the gradient is the sum of the gradients of all ranks."""
        return allreduce(sums, Sum, name=f"{self.name}.{what}")

"""DistributedGradientTape and DistributedOptimizer: gradients of TensorFlow that are combined over ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.traced.gradient_reduction import GradientReduction, refuse_placements
from hvdtrain.horovod.traced.on_host import as_written

_WHERE = "hvd.DistributedGradientTape()"


@as_written
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """The tape, whose gradient() is that of all ranks; jacobian() and batch_jacobian() are those of this rank.

    Raises BadCall for arguments of Horovod's that would do nothing: devices, groups, scale_local_gradients=False.
    """
    refuse_placements(_WHERE, device_dense=device_dense, device_sparse=device_sparse, num_groups=num_groups, groups=groups)
    if not scale_local_gradients:
        raise BadCall("scale_local_gradients=False has no meaning: all gradients are reduced", _WHERE, "the call without it")
    if isinstance(gradtape, ReducingTape):
        raise BadCall("this tape is a DistributedGradientTape already", _WHERE, "wrap the tape of TensorFlow, once")
    name = "gradients of a tape"
    reduction = GradientReduction(name, _WHERE, compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    kind = type(gradtape)
    found: Any = object.__new__(type(kind.__name__, (ReducingTape, kind), {"_reduction": reduction}))
    found.__dict__.update(gradtape.__dict__)
    return found


class ReducingTape:
    """The methods that DistributedGradientTape puts before those of a tape."""

    _reduction: GradientReduction

    @as_written
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: Any = tf.UnconnectedGradients.NONE
    ) -> Any:
        """That of the tape, reduced; None where a source has none."""
        base: Any = super()
        grads = base.gradient(target, sources, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(grads, self._reduction.reduce(tf.nest.flatten(grads)))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """The DistributedOptimizer of hvdtrain.horovod.keras, in the order of arguments of horovod.tensorflow."""
    from hvdtrain.horovod.keras.optimizer import DistributedOptimizer as for_keras

    refuse_placements("hvd.DistributedOptimizer()", use_locking=use_locking)
    return for_keras(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )

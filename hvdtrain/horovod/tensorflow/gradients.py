"""DistributedGradientTape and DistributedOptimizer: gradients of TensorFlow that are combined over
ranks."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.libraries import as_written
from hvdtrain.horovod.traced.gradient_reduction import GradientReduction, refuse_placements

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
    """Returns the tape with a gradient() over all ranks; jacobian() and batch_jacobian() are still
    this rank's.

    register_local_source(variable) of the returned tape makes a variable local to each rank: its
    gradient is not reduced, but divided by the number of ranks if scale_local_gradients is True.

    Raises BadCall for Horovod arguments that would have no effect: devices, groups.
    """
    refuse_placements(
        _WHERE,
        device_dense=device_dense,
        device_sparse=device_sparse,
        num_groups=num_groups,
        groups=groups,
    )
    if isinstance(gradtape, ReducingTape):
        raise BadCall(
            "this tape is already a DistributedGradientTape",
            _WHERE,
            "wrap the TensorFlow tape once",
        )
    how = (
        compression,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        scale_local_gradients,
    )
    reduction = GradientReduction("gradients of a tape", _WHERE, *how, has_adasum=True)
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (ReducingTape, kind), {"_reduction": reduction}))
    tape.__dict__.update(gradtape.__dict__)
    return tape


@as_written
def PartialDistributedGradientTape(
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a DistributedGradientTape with the variables of some Keras layers local to each rank.

    local_layers: a built layer, or several.
    """
    from hvdtrain.horovod.keras.optimizer import variables_of_layers

    how = (
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, *how)
    for variable in variables_of_layers(local_layers, "hvd.PartialDistributedGradientTape()"):
        tape.register_local_source(variable)
    return tape


class ReducingTape:
    """The methods of a tape that DistributedGradientTape overrides."""

    _reduction: GradientReduction

    @as_written
    def register_local_source(self, source: Any) -> None:
        """Makes this variable local: its gradient is not reduced over ranks."""
        self._reduction.local.add(_identity(source))

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        *,
        use_generic_names: bool = False,
    ) -> Any:
        """Returns the tape's gradient, reduced; None if a source has none. use_generic_names: has
        no effect, because names come from the calls."""
        base: Any = super()
        grads = base.gradient(target, sources, output_gradients, unconnected_gradients)
        found = self._reduction.reduce(
            tf.nest.flatten(grads), [_identity(source) for source in tf.nest.flatten(sources)]
        )
        return tf.nest.pack_sequence_as(grads, found)

    @as_written
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Returns pairs of (source, gradient) for local sources, and for the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if _identity(pair[0]) in self._reduction.local]
        return local, [pair for pair in pairs if _identity(pair[0]) not in self._reduction.local]


def _identity(source: Any) -> int:
    """Returns the identity of a TensorFlow variable, also if a Keras variable wraps it."""
    keras = sys.modules.get("keras")
    return id(source.value if keras is not None and isinstance(source, keras.Variable) else source)


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
    """Returns the DistributedOptimizer of hvdtrain.horovod.keras, in the order of arguments of
    horovod.tensorflow."""
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

"""Where horovod.tensorflow.functions has variables and objects of one rank on all."""

from hvdtrain.horovod.tensorflow.calls import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
)
from hvdtrain.horovod.traced.variables import broadcast_variables

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]

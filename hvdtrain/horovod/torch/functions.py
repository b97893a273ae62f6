"""Where horovod.torch.functions has parameters, optimizer states and objects of one rank on all."""

from hvdtrain.horovod.objects import allgather_object, broadcast_object
from hvdtrain.horovod.parameters import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

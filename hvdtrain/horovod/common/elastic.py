"""Where horovod.common.elastic has the states."""

from hvdtrain.horovod.elastic import ObjectState, State

__all__ = ["ObjectState", "State"]

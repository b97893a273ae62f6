"""Where horovod.torch.elastic.state has the states."""

from hvdtrain.horovod.elastic import ObjectState, State, TorchState

__all__ = ["ObjectState", "State", "TorchState"]

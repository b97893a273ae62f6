"""Where horovod.torch.optimizer has DistributedOptimizer()."""

from hvdtrain.horovod.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

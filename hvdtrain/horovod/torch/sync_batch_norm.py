"""Where horovod.torch.sync_batch_norm has the module."""

from hvdtrain.horovod.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]

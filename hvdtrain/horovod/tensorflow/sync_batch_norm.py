"""Where horovod.tensorflow.sync_batch_norm has the layer."""

from hvdtrain.horovod.keras.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]

"""Where horovod.tensorflow.keras.callbacks has the callbacks of hvdtrain.horovod.keras."""

from hvdtrain.horovod.keras.callbacks import *  # noqa: F403

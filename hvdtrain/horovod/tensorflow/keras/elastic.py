"""Where horovod.tensorflow.keras.elastic has hvdtrain.horovod.keras.elastic."""

from hvdtrain.horovod.keras.elastic import *  # noqa: F403

"""`import hvdtrain.horovod.tensorflow.keras as hvd`: the names of hvdtrain.horovod.keras."""

from hvdtrain.horovod.keras import *  # noqa: F403
from hvdtrain.horovod.keras import __getattr__ as __getattr__

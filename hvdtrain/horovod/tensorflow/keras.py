"""`import hvdtrain.horovod.tensorflow.keras as hvd`: the names of hvdtrain.horovod.keras."""

from hvdtrain.horovod.keras import *  # noqa: F403
from hvdtrain.horovod.keras import __getattr__ as __getattr__  # noqa: PLC0414
from hvdtrain.horovod.keras import callbacks as callbacks  # noqa: PLC0414
from hvdtrain.horovod.keras import elastic as elastic  # noqa: PLC0414

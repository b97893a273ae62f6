"""`import hvdtrain.horovod.torch as hvd`: the names of hvdtrain.horovod."""

from hvdtrain.horovod import *  # noqa: F403
from hvdtrain.horovod import __getattr__ as __getattr__

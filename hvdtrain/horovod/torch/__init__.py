"""`import hvdtrain.horovod.torch as hvd`: the names of hvdtrain.horovod."""

from hvdtrain.horovod import *  # noqa: F403
from hvdtrain.horovod import __getattr__ as __getattr__
from hvdtrain.horovod.torch import functions as functions
from hvdtrain.horovod.torch import mpi_ops as mpi_ops

"""Where horovod.torch.mpi_ops has the collectives."""

from hvdtrain.horovod import *  # noqa: F403

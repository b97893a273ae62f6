"""Where horovod.tensorflow.mpi_ops has the collectives, ranks and sizes."""

from hvdtrain.horovod.tensorflow import *  # noqa: F403

"""The build information of horovod.common.util."""

from hvdtrain.horovod.basics import (
    ccl_built,
    check_extension,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
)

__all__ = ["ccl_built", "check_extension", "ddl_built", "gloo_built", "mpi_built", "nccl_built"]

"""What this engine is built with, in Horovod's words."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether the ranks of this job are connected by MPI: on the mpi engine, and by Horovod on MPI."""
    return JOB.is_initialized and JOB.engine.name in ("mpi", "horovod on MPI")


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at the same time. Raises ValueError where MPI does not run."""
    if not mpi_enabled():
        raise BadCall("Horovod MPI is not enabled", "hvd.mpi_threads_supported()", "HVDTRAIN_ENGINE=mpi")
    from hvdtrain.comm.mpi import load

    mpi = load()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Whether torch.distributed has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the ranks of this job are connected by Gloo: on the torchdist engine, and by Horovod without MPI."""
    return JOB.is_initialized and JOB.engine.name in ("torchdist", "horovod on Gloo")


def nccl_built() -> int:
    """The version of torch's own NCCL, as NCCL counts it; 0 where there is none."""
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0)[:3]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's library is not used."""
    return False


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Nothing for "horovod.torch", which needs no extension here. Raises ImportError for that of another framework."""
    if ext_name not in ("horovod.torch", "hvdtrain.horovod", "hvdtrain.horovod.torch"):
        raise ImportError(f"Extension {ext_name} has not been built: hvdtrain.horovod is for torch")

"""The section comm: the engine, and how gradients are reduced."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section
from hvdtrain.core.lengths import LengthValue


@with_keys_of_extras
class CommConfig(Section):
    """Communication between ranks."""

    section = "comm"
    engine: str = Field(
        default="auto",
        description="single, horovod, mpi, or torchdist (torch.distributed: NCCL on GPUs, Gloo on "
        "CPUs); "
        "auto: chosen by the launcher, the header says why",
    )
    address: str | None = Field(
        default=None,
        description="HOST:PORT of the rendezvous of comm.engine=torchdist, on the host of rank 0; "
        "default: the launcher's",
    )
    timeout_s: float = Field(
        default=1800.0,
        ge=1,
        le=1e7,
        description="timeout of torchdist's rendezvous and collectives in seconds",
    )
    reduce: Literal["auto", "distributed_optimizer", "ddp", "bucket"] = Field(
        default="auto",
        description="how gradients are reduced: distributed_optimizer: by "
        "hvd.DistributedOptimizer; ddp: by DDP of torch.distributed; "
        "bucket: in hvdtrain's buckets, overlapped with backward where the engine is asynchronous; "
        "auto: distributed_optimizer with horovod where it can, else bucket",
    )
    device_memory: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="how comm.engine=mpi takes tensors on GPUs: device: MPI gets them as they "
        "are; host: MPI gets copies in page-locked "
        "host memory, which are made while the GPU computes; auto: device where MPI says on every "
        "rank that it takes them, else host. The "
        "header says which, and why",
    )
    bucket_mb: float = Field(
        default=4.0, ge=2**-10, le=2**14, description="size of a gradient bucket in MiB"
    )
    compression: Literal["none", "fp16", "bf16"] = Field(
        default="none",
        description="number type in which gradients are sent; none: that of the weights; fp16 and "
        "bf16 need comm.reduce=bucket",
    )
    local_steps: int = Field(
        default=1,
        ge=1,
        le=10**9,
        description="local SGD: ranks train separately for this many steps, then average weights "
        "and optimizer state; "
        "log.every_steps must be a multiple",
    )
    local_from: LengthValue = Field(
        default=0,
        description="a length as recipe.warmup, from the beginning of the job, after which "
        "comm.local_steps begins; before it gradients "
        "are reduced in each step (post-local SGD: Lin et al. 2018, arXiv:1808.07217)",
    )
    tune: bool = Field(
        default=False,
        description="measure bucket sizes (and Horovod's cycle times) at the start and use the "
        "fastest; "
        "sums may round differently in the next run",
    )
    op: Literal["mean", "adasum"] = Field(
        default="mean",
        description="mean: of the gradients; adasum: Horovod's Adasum (Maleki 2020, "
        "arXiv:2006.02924)",
    )
    hierarchical: bool = Field(
        default=False,
        description="Horovod reduces inside each host first (HOROVOD_HIERARCHICAL_ALLREDUCE)",
    )
    cycle_ms: float | None = Field(
        default=None,
        ge=0.001,
        le=1e4,
        description="cycle time of Horovod's background thread in ms (HOROVOD_CYCLE_TIME); "
        "default: Horovod's own, 1 ms",
    )
    fusion_mb: float | None = Field(
        default=None,
        ge=0,
        le=1e5,
        description="Horovod fuses small tensors up to this size in MiB "
        "(HOROVOD_FUSION_THRESHOLD); "
        "default: 4, or with NCCL Horovod's own 128",
    )

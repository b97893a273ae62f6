"""The section comm: the engine, and how gradients are reduced."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section
from hvdtrain.core.lengths import LengthValue

BUCKET_MB = 4.0
# With NCCL, each collective is a kernel, and a ring moves a bucket in parts of 1 / ranks. Below a
# quarter of a MiB, latency outweighs bandwidth. DDP uses 25, Megatron-LM 4 per rank.
NCCL_BUCKET_MB = 25.0
NCCL_RANK_MB = 0.25
NCCL_MOST_MB = 256.0  # a ZeRO step holds two buckets, besides the weights


@with_keys_of_extras
class CommConfig(Section):
    """Communication between ranks."""

    section = "comm"
    engine: str = Field(
        default="auto",
        description="single, horovod, mpi, or torchdist (torch.distributed: NCCL on GPUs, "
        "Gloo on CPUs); auto: chosen by the launcher; the header says which and "
        "why",
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
        description="how gradients are reduced; distributed_optimizer: by "
        "hvd.DistributedOptimizer; ddp: by torch.distributed's DDP; bucket: in "
        "hvdtrain's own buckets, overlapped with the backward pass if the engine "
        "is asynchronous; auto: distributed_optimizer on horovod if the job "
        "allows it, otherwise bucket",
    )
    device_memory: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="how comm.engine=mpi handles tensors on GPUs; device: passes them to MPI "
        "directly; host: passes copies in page-locked host memory, made while the "
        "GPU computes; auto: device if MPI reports support for it on every rank, "
        "otherwise host. The header says which and why",
    )
    bind: Literal["none", "numa", "gpu"] = Field(
        default="none",
        description="cores on which the threads of a rank run; numa: its own share of the host's "
        "cores, in order of NUMA nodes; gpu: its share of the cores next to its GPU; none: all "
        "cores that the launcher gave it. Cores that the launcher bound are kept",
    )
    bucket_mb: float | None = Field(
        default=None,
        ge=2**-10,
        le=2**14,
        description="size of a gradient bucket in MiB; default: 4; with NCCL 25 up to 100 ranks, "
        "then a quarter for each rank, 256 at most",
    )
    compression: Literal["none", "fp16", "bf16"] = Field(
        default="none",
        description="data type in which gradients are sent; none: that of the weights; fp16 "
        "and bf16 require comm.reduce=bucket",
    )
    local_steps: int = Field(
        default=1,
        ge=1,
        le=10**9,
        description="local SGD: ranks train independently for this many steps, then average "
        "weights and optimizer state; log.every_steps must be a multiple of it",
    )
    local_from: LengthValue = Field(
        default=0,
        description="point from which comm.local_steps applies, counted from the start of the "
        "job in the units of recipe.warmup; before it, gradients are reduced in "
        "every step (post-local SGD: Lin et al. 2018, arXiv:1808.07217)",
    )
    tune: bool = Field(
        default=False,
        description="measure several bucket sizes (and cycle times of Horovod) at the start "
        "and use the fastest; sums may be rounded differently in the next run",
    )
    op: Literal["mean", "adasum"] = Field(
        default="mean",
        description="mean: average the gradients; adasum: combine them with Horovod's Adasum "
        "(Maleki 2020, arXiv:2006.02924)",
    )
    hierarchical: bool = Field(
        default=False,
        description="Horovod reduces within each host first (HOROVOD_HIERARCHICAL_ALLREDUCE)",
    )
    cycle_ms: float | None = Field(
        default=None,
        ge=0.001,
        le=1e4,
        description="cycle time of Horovod's background thread in ms (HOROVOD_CYCLE_TIME); "
        "default: 0.1 if the ranks of one host reduce in host memory, otherwise Horovod's own, 1",
    )
    fusion_mb: float | None = Field(
        default=None,
        ge=0,
        le=1e5,
        description="Horovod fuses small tensors into buffers of up to this size in MiB "
        "(HOROVOD_FUSION_THRESHOLD); default: 4, or Horovod's own 128 with NCCL",
    )

    def bucket_bytes(self, nccl_ranks: int = 0) -> int:
        """Returns the bucket size in bytes. nccl_ranks: the number of ranks that reduce by NCCL; 0
        without NCCL."""
        if self.bucket_mb is not None:
            return int(self.bucket_mb * 2**20)
        if not nccl_ranks:
            return int(BUCKET_MB * 2**20)
        return int(min(max(NCCL_BUCKET_MB, NCCL_RANK_MB * nccl_ranks), NCCL_MOST_MB) * 2**20)

"""The sections of the schema that say how a job runs: ranks, speed, stop, checkpoints, guard, log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class CommConfig:
    """How ranks talk."""

    engine: str = "auto"
    """auto: what fits the launcher, and says why; single, horovod, mpi, or torchdist (torch.distributed: NCCL on GPUs, Gloo on CPUs)"""
    address: str | None = None
    """HOST:PORT where the ranks of torchdist meet, with a host of rank 0; where left out the launcher's own word"""
    timeout_s: float = 1800.0
    """seconds that ranks of torchdist wait for each other, when they meet and in a collective"""
    reduce: Literal["auto", "distributed_optimizer", "ddp", "bucket"] = "auto"
    """how gradients meet: hvd.DistributedOptimizer (auto on Horovod), DDP (on torchdist), or own buckets overlapped with backward"""
    bucket_mb: float = 4.0
    """size of one gradient bucket (MiB)"""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """number type in which gradients travel: that of the weights, or half of it, with buckets"""
    local_steps: int = 1
    """local steps: ranks train apart for so many, then weights and slots become their mean; log.every_steps: a multiple"""
    tune: bool = False
    """measure bucket sizes (and Horovod's cycle times) at the start, and take the fastest; sums may round otherwise in the next run"""
    op: Literal["mean", "adasum"] = "mean"
    """how gradients are combined: their mean, or Horovod's Adasum (Maleki 2020, arXiv:2006.02924)"""
    hierarchical: bool = False
    """Horovod reduces inside each host first (HOROVOD_HIERARCHICAL_ALLREDUCE)"""
    cycle_ms: float | None = None
    """pause between two turns of Horovod's thread (HOROVOD_CYCLE_TIME, ms); where left out Horovod's own, 1 ms"""
    fusion_mb: float | None = None
    """Horovod joins small tensors up to this size (HOROVOD_FUSION_THRESHOLD, MiB); where left out 4, or with NCCL Horovod's own 128"""


@dataclass(frozen=True)
class SpeedConfig:
    """How one rank computes."""

    precision: Literal["auto", "fp32", "fp64", "bf16", "fp16"] = "fp32"
    """number type: fp32, fp64; bf16, fp16: weights stay fp32, layers compute in half of it; auto: bf16 where the device is built for it"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of this rank's local rank where there is one"""
    channels_last: bool | None = None
    """images with their channels innermost; where left out so for the named models, not for a class of your own (framework=torch)"""
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    """torch.compile's mode; reduce-overhead: CUDA graphs (framework=torch)"""


@dataclass(frozen=True)
class StopConfig:
    """When to stop before the last epoch."""

    target_accuracy: float | None = None
    """validation accuracy to reach, 0 to 1"""
    patience: int = 1
    """stop after this many epochs in a row at target_accuracy or above"""


@dataclass(frozen=True)
class CheckpointConfig:
    """When rank 0 writes the state of the job: at the end of each epoch, before it stops, and when these say so."""

    every_steps: int | None = None
    """steps between two checkpoints"""
    every_minutes: float | None = 10.0
    """minutes between two checkpoints, at most; written where the ranks meet (log.every_steps)"""
    keep_last: int = 2
    """newest checkpoints that stay in the run folder"""
    keep_best: int = 0
    """checkpoints of the best validation accuracies that stay too"""


@dataclass(frozen=True)
class GuardConfig:
    """What watches over a job."""

    max_time: str | None = None
    """stop, with a checkpoint, before the job has run this long: 90 (seconds), 45m, 3.5h, 1:30:00, 2-00:00:00; also --max-time"""
    stall_s: float | None = 300.0
    """seconds without progress after which a report names the ranks that are behind, and the job ends; null: wait for ever"""
    start_s: float | None = 600.0
    """the same up to the end of the first steps: start of MPI, reading of data, building, compiling; and for the last checkpoint"""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """a loss or gradient that is not finite: stop; skip that step; or rollback to the newest checkpoint and go on with the next data"""
    nonfinite_limit: int = 20
    """steps skipped, or rollbacks, after which the job stops all the same"""
    equal_steps: int | None = 100
    """steps between two comparisons of all ranks' weights, buffers, optimizer slots, lr and step; null: never"""


@dataclass(frozen=True)
class ProfileConfig:
    """What is looked at closely; HOROVOD_TIMELINE=FILE in the environment has Horovod write its own timeline beside it."""

    steps: str | None = None
    """A:B traces what follows step A up to step B on every rank, into RUN/profile/rank-00000/ for https://ui.perfetto.dev; costs time"""


@dataclass(frozen=True)
class LogConfig:
    """What is said on the way."""

    every_steps: int = 10
    """steps between two meetings of all ranks: sums are added up, signals are heard, checkpoints written; costs a wait for the device"""
    every_s: float = 10.0
    """seconds between two progress lines inside an epoch, at least; a live display is renewed once a second"""
    display: Literal["auto", "live", "lines"] = "auto"
    """live: a display that moves; lines: plain lines, fit for a file; auto: live where rank 0 writes to a terminal of a person"""
    per_rank: bool = False
    """each rank writes its own times and warnings to RUN/ranks/rank-00000.log"""
    trackers: list[str] = field(default_factory=list)
    """where figures go beside RUN/events.jsonl: tensorboard, mlflow, wandb"""
    targets: list[float] = field(default_factory=list)
    """validation accuracies whose time, epochs, images and joules are told when they are first reached, as is stop.target_accuracy's"""
    step_times: bool = False
    """an event for each step with the time of each of its phases and the slowest rank; costs one small allgather where the ranks meet"""
    noise_scale: bool = False
    """measure the gradient noise scale, and log it with the critical batch size that it suggests; needs two ranks or more"""

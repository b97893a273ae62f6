"""Every key that a user can set: type, default, bounds, and the description that `--help` and editors show."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from hvdtrain.config.section import OpenSection, Provenance, Section

# Sections whose name picks a file of a folder; keys that are not fields here are options of that file's build().
OPEN_SECTIONS = {"data": "data/datasets", "model": "frameworks/torch/models", "optim": "optim"}

SHORTHANDS = {"speed=auto": "speed.precision=auto"}  # an argument -> what it stands for: the other keys of speed are automatic already

# Keys that had another name -> what to write now.
RENAMED = {
    "frame": "it is framework now",
    "comm.every": "it is comm.local_steps now",
    "comm.wire": "it is comm.compression now, with none instead of same",
    "log.sinks": "it is log.trackers now",
}


class DataConfig(OpenSection):
    """The data set, and how samples reach the ranks."""

    section = "data"
    name: str = Field(
        default="digits",
        description="data set: digits (embedded), mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, webdataset, synthetic",
    )
    root: str | None = Field(default=None, description="folder that holds the data; default: the data set's own")
    stage: str | None = Field(
        default=None,
        description="folder on a local disk of each node: one rank per node copies the data there and verifies it, and every rank "
        "of the node reads the copy",
    )
    sampling: Literal["global", "partition"] = Field(
        default="global",
        description="global: each rank reads its slice of every global batch; "
        "partition: each epoch's shuffled samples are divided among the ranks first",
    )
    resident: bool | None = Field(
        default=None, description="keep the training set on the device; default: on a GPU with four times the room"
    )
    ahead: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="steps prefetched during training; default: one per reader, at least 2, and 0 for data that is in memory",
    )
    readers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="threads that read and decode for this rank; default: its share of the cores, at most 8",
    )


class AugmentConfig(Section):
    """Augmentation of training images; the random numbers of an image depend on (seed, epoch, sample) only."""

    section = "augment"
    crop: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="random crop of the image's own size after padding with this many black pixels on each side (CIFAR: 4)",
    )
    resized_crop: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="random crop of at least this share of the area, aspect ratio 3/4 to 4/3, resized to the image's size; "
        "0: off (ImageNet: 0.08)",
    )
    flip: bool = Field(default=False, description="mirror an image left to right with probability 1/2")
    cutout: int = Field(
        default=0, ge=0, le=10_000, description="black out a square with this side length in pixels (DeVries 2017, arXiv:1708.04552)"
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha: mix each image and its label with another sample's, in a proportion drawn from Beta(alpha, alpha) "
        "(Zhang 2017, arXiv:1710.09412)",
    )


class BatchConfig(Section):
    """Samples per step."""

    section = "batch"
    size: int = Field(default=64, ge=1, le=10**9, description="global batch: samples per step, summed over all ranks")
    per_rank: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="samples per step on each rank, instead of batch.size: batch.size becomes this times the number of ranks at the "
        "start of the job",
    )
    micro: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="largest number of samples in one forward pass of one rank; gradients of a step's passes are accumulated",
    )
    evaluate: int = Field(default=500, ge=1, le=10**9, description="samples in one forward pass of one rank during evaluation")


class ModelConfig(OpenSection):
    """The model and its loss."""

    section = "model"
    name: str = Field(
        default="wide_resnet",
        description="model: wide_resnet, convnet, resnet18 ... resnet152, mlp, linear, or package.module:Class of your own",
    )
    loss: Literal["cross_entropy", "squared_error"] = Field(
        default="cross_entropy",
        description="cross_entropy: of the softmax; squared_error: half the squared distance to the one-hot label",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the label spread over all classes in training; validation loss is computed without it",
    )
    classifier_std: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="standard deviation of the last linear layer's initial weights, with bias 0 (Goyal 2017: 0.01); framework=torch only",
    )


class OptimConfig(OpenSection):
    """The optimizer."""

    section = "optim"
    name: str = Field(
        default="sgd",
        description="optimizer: sgd, adam, adamw, lars, larc, lamb, novograd, or a torch.optim.Optimizer by its import path: "
        "torch.optim.RMSprop",
    )
    base_lr: float = Field(default=0.02, ge=0, le=1e6, description="learning rate for a global batch of base_batch, after the warm-up")
    base_batch: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="global batch that base_lr belongs to; default: batch.size, so that only a growing batch scales the rate",
    )
    momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="momentum, or the first beta of Adam-like optimizers; default: the optimizer's own, 0.9 or 0.95 for novograd",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="weight decay: weight_decay x weight is added to the gradient, or as the optimizer defines it",
    )
    exclude: Literal["norms_and_biases", "none"] = Field(
        default="norms_and_biases",
        description="norms_and_biases: parameters with at most one dimension are not decayed and not scaled by lars, larc, lamb; "
        "none: all are",
    )
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        le=1e30,
        description="largest Euclidean norm of the mean gradient over all parameters; a longer gradient is scaled down",
    )
    clip_value: float | None = Field(
        default=None,
        gt=0,
        le=1e30,
        description="clamp each element of the mean gradient to [-clip_value, clip_value], before clip_norm",
    )


class PieceConfig(Section):
    """One piece of a chain of schedules: an entry of recipe.chain."""

    section = "recipe.chain"
    kind: Literal["constant", "steps", "cosine", "polynomial", "exponential"] = Field(default="constant", description="as recipe.schedule")
    epochs: float | None = Field(
        default=None, gt=0, le=1e9, description="length of the piece; the last piece may leave it out and then lasts to the end of the job"
    )
    scale: float = Field(default=1.0, ge=0, description="rate at the beginning of the piece, as a share of the scaled rate")
    milestones: list[float] = Field(default_factory=list, description="as recipe.milestones, counted from the beginning of the piece")
    gamma: float = Field(default=0.1, ge=0, le=1e3, description="as recipe.gamma")
    power: float = Field(default=2.0, ge=0, le=100, description="as recipe.power")
    end_lr: float = Field(default=0.0, ge=0, le=1e6, description="as recipe.end_lr")


class RecipeConfig(Section):
    """How learning rate, batch and noise change over the job."""

    section = "recipe"
    scale: Literal["linear", "sqrt", "none"] = Field(
        default="linear",
        description="how the rate depends on the global batch B: linear: base_lr x B / base_batch; "
        "sqrt: base_lr x sqrt(B / base_batch); none: base_lr",
    )
    warmup: Literal["gradual", "constant", "none"] = Field(
        default="gradual",
        description="gradual: the rate rises linearly with each step from warmup_from; "
        "constant: it stays at warmup_from, then jumps; none: no warm-up",
    )
    warmup_epochs: float = Field(default=0.0, ge=0, le=1e9, description="length of the warm-up in epochs")
    warmup_steps: int = Field(default=0, ge=0, le=10**9, description="length of the warm-up in steps, instead of warmup_epochs")
    warmup_from: float | None = Field(
        default=None, ge=0, le=1e6, description="rate at the beginning of the warm-up; default: base_lr if scaling raises it, else 0"
    )
    schedule: Literal["constant", "steps", "cosine", "polynomial", "exponential"] = Field(
        default="constant",
        description="the rate after the warm-up: steps multiplies it by gamma at each milestone; "
        "cosine and polynomial fall to end_lr at the last epoch",
    )
    milestones: list[float] = Field(
        default_factory=list,
        description="epochs, counted from the beginning of the job, at which schedule=steps multiplies the rate by gamma",
    )
    gamma: float = Field(
        default=0.1,
        ge=0,
        le=1e3,
        description="factor of the rate at each milestone of schedule=steps, and for each epoch after the warm-up with "
        "schedule=exponential",
    )
    power: float = Field(default=2.0, ge=0, le=100, description="exponent of schedule=polynomial")
    end_lr: float = Field(default=0.0, ge=0, le=1e6, description="final rate of schedule=cosine and schedule=polynomial")
    chain: list[PieceConfig] = Field(
        default_factory=list,
        description="schedules one after the other, instead of recipe.schedule: a list of {kind, epochs, scale, milestones, gamma, "
        "power, end_lr}",
    )
    growth: Literal["none", "decays", "milestones"] = Field(
        default="none",
        description="decays: where the schedule would divide the rate by a, the batch is multiplied by a, up to batch_max; "
        "milestones: as grow_at and grow_to say",
    )
    batch_max: int | None = Field(
        default=None, ge=1, le=10**9, description="largest global batch of growth=decays; once it is reached, the rate decays"
    )
    grow_at: list[float] = Field(default_factory=list, description="epochs at which growth=milestones changes the global batch")
    grow_to: list[int] = Field(default_factory=list, description="global batch from each epoch of grow_at on")
    adapt_regime: bool = Field(
        default=False,
        description="train longer: multiply epochs and every epoch count of the recipe by ceil(batch.size / base_batch)",
    )
    sample_noise: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="weight each sample's loss randomly, with mean 1 and variance sample_noise x (B / base_batch - 1); "
        "1 gives the gradient noise of base_batch",
    )
    gradient_noise: float = Field(
        default=0.0, ge=0, le=1e6, description="eta: add noise of variance eta / (1 + step)^0.55 to the mean gradient"
    )


class NormConfig(Section):
    """Statistics of the model's batch norm layers (framework=torch)."""

    section = "norm"
    kind: Literal["batch", "ghost", "sync"] = Field(
        default="batch",
        description="batch: statistics of one rank's forward pass; ghost: of each `ghost` samples of it; sync: of all ranks' samples",
    )
    ghost: int = Field(default=128, ge=1, le=10**9, description="samples in a ghost batch")
    statistics: Literal["averaged", "sequential"] = Field(
        default="averaged",
        description="running statistics of ghost batches: averaged: one update by their mean; "
        "sequential: one update by each, as in Hoffer's code",
    )


class CommConfig(Section):
    """Communication between ranks."""

    section = "comm"
    engine: str = Field(
        default="auto",
        description="single, horovod, mpi, or torchdist (torch.distributed: NCCL on GPUs, Gloo on CPUs); "
        "auto: chosen by the launcher, the header says why",
    )
    address: str | None = Field(
        default=None,
        description="HOST:PORT of the rendezvous of comm.engine=torchdist, on the host of rank 0; default: the launcher's",
    )
    timeout_s: float = Field(default=1800.0, ge=1, le=1e7, description="timeout of torchdist's rendezvous and collectives in seconds")
    reduce: Literal["auto", "distributed_optimizer", "ddp", "bucket"] = Field(
        default="auto",
        description="how gradients are reduced: hvd.DistributedOptimizer (default with horovod), DDP (with torchdist), or "
        "hvdtrain's buckets, overlapped with backward where the engine is asynchronous",
    )
    bucket_mb: float = Field(default=4.0, ge=2**-10, le=2**14, description="size of a gradient bucket in MiB")
    compression: Literal["none", "fp16", "bf16"] = Field(
        default="none",
        description="number type in which gradients are sent; none: that of the weights; fp16 and bf16 need comm.reduce=bucket",
    )
    local_steps: int = Field(
        default=1,
        ge=1,
        le=10**9,
        description="local SGD: ranks train separately for this many steps, then average weights and optimizer state; "
        "log.every_steps must be a multiple",
    )
    tune: bool = Field(
        default=False,
        description="measure bucket sizes (and Horovod's cycle times) at the start and use the fastest; "
        "sums may round differently in the next run",
    )
    op: Literal["mean", "adasum"] = Field(
        default="mean", description="mean of the gradients, or Horovod's Adasum (Maleki 2020, arXiv:2006.02924)"
    )
    hierarchical: bool = Field(default=False, description="Horovod reduces inside each host first (HOROVOD_HIERARCHICAL_ALLREDUCE)")
    cycle_ms: float | None = Field(
        default=None,
        ge=0.001,
        le=1e4,
        description="cycle time of Horovod's background thread in ms (HOROVOD_CYCLE_TIME); default: Horovod's own, 1 ms",
    )
    fusion_mb: float | None = Field(
        default=None,
        ge=0,
        le=1e5,
        description="Horovod fuses small tensors up to this size in MiB (HOROVOD_FUSION_THRESHOLD); "
        "default: 4, or with NCCL Horovod's own 128",
    )


class SpeedConfig(Section):
    """How each rank computes."""

    section = "speed"
    precision: Literal["auto", "fp32", "fp64", "bf16", "fp16"] = Field(
        default="fp32",
        description="number type: fp32, fp64; bf16, fp16: weights stay in fp32, layers compute in 16 bits; "
        "auto: bf16 where the device supports it in hardware",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the GPU with this rank's local rank if there is one, else the CPU"
    )
    channels_last: bool | None = Field(
        default=None,
        description="channels-last memory format for images; default: yes for built-in models, no for a class of your own "
        "(framework=torch)",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        default="none", description="torch.compile's mode; reduce-overhead: CUDA graphs (framework=torch)"
    )


class StopConfig(Section):
    """When to stop before the last epoch."""

    section = "stop"
    target_accuracy: float | None = Field(default=None, ge=0, le=1, description="validation accuracy at which the job stops")
    patience: int = Field(default=1, ge=1, le=10**9, description="stop only after this many consecutive epochs at target_accuracy or above")


class CheckpointConfig(Section):
    """When rank 0 writes checkpoints, besides the end of each epoch and the end of the job."""

    section = "checkpoint"
    every_steps: int | None = Field(default=None, ge=1, le=10**15, description="steps between two checkpoints")
    every_minutes: float | None = Field(
        default=10.0,
        ge=0,
        le=1e9,
        description="longest time between two checkpoints in minutes; written at the next sync point (log.every_steps)",
    )
    keep_last: int = Field(default=2, ge=1, le=10**9, description="number of newest checkpoints kept in the run folder")
    keep_best: int = Field(default=0, ge=0, le=10**9, description="number of checkpoints with the best validation accuracy kept as well")


class GuardConfig(Section):
    """Time limit, stall detection, and checks of the job's health."""

    section = "guard"
    max_time: str | None = Field(
        default=None,
        description="stop with a checkpoint before the job has run this long: 90 (seconds), 45m, 3.5h, 1:30:00, 2-00:00:00; "
        "also --max-time",
    )
    stall_s: float | None = Field(
        default=300.0,
        ge=1,
        le=1e9,
        description="seconds without progress after which the job ends with a report of the ranks that are behind; null: wait forever",
    )
    start_s: float | None = Field(
        default=600.0,
        ge=1,
        le=1e9,
        description="the same until the first steps are done (start of MPI, reading data, building, compiling), and for the last "
        "checkpoint",
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a loss or gradient is not finite: stop the job; skip the step; "
        "or rollback to the newest checkpoint and continue with the data after it",
    )
    nonfinite_limit: int = Field(default=20, ge=0, le=10**9, description="number of skipped steps or rollbacks after which the job stops")
    equal_steps: int | None = Field(
        default=100,
        ge=1,
        le=10**15,
        description="steps between two comparisons of weights, buffers, optimizer state, lr and step across all ranks; null: never",
    )


class LogConfig(Section):
    """What is logged, and how often."""

    section = "log"
    every_steps: int = Field(
        default=10,
        ge=1,
        le=10**9,
        description="steps between two sync points, where all ranks sum metrics, react to signals and write checkpoints; "
        "costs a wait for the device",
    )
    every_s: float = Field(
        default=10.0,
        ge=0,
        le=1e9,
        description="shortest time between two progress lines within an epoch in seconds; a live display updates once a second",
    )
    display: Literal["auto", "live", "lines"] = Field(
        default="auto",
        description="live: a display that updates in place; lines: plain lines, suited to a file; "
        "auto: live if rank 0 writes to an interactive terminal",
    )
    per_rank: bool = Field(default=False, description="each rank writes its times and warnings to RUN/ranks/rank-00000.log")
    trackers: list[str] = Field(
        default_factory=list, description="trackers that record the metrics besides RUN/events.jsonl: tensorboard, mlflow, wandb"
    )
    targets: list[float] = Field(
        default_factory=list,
        description="validation accuracies for which time, epochs, images and joules are reported when first reached, as for "
        "stop.target_accuracy",
    )
    step_times: bool = Field(
        default=False,
        description="write an event per step with the time of each phase and the slowest rank; costs one small allgather per sync point",
    )
    noise_scale: bool = Field(
        default=False,
        description="measure and log the gradient noise scale and the critical batch size that follows from it; needs at least two ranks",
    )


class ProfileConfig(Section):
    """Traces of single steps; HOROVOD_TIMELINE=FILE in the environment makes Horovod write its own timeline as well."""

    section = "profile"
    steps: str | None = Field(
        default=None,
        description="A:B traces the steps after step A up to step B on every rank into RUN/profile/rank-00000/, for "
        "https://ui.perfetto.dev; slows these steps",
    )


class Config(Section):
    """The configuration of a job."""

    framework: str = Field(
        default="torch", description="framework that computes on each rank: torch, jax, or numpy (the reference for linear models)"
    )
    run: str | None = Field(default=None, description="run folder; default: runs/DATA-MODEL-TIME")
    resume: str = Field(
        default="auto",
        description="auto: continue from the newest intact checkpoint of run= if there is one; no: start over; "
        "RUN: continue that run folder with its configuration",
    )
    epochs: int = Field(default=10, ge=1, le=10**9, description="passes over the training set")
    max_steps: int | None = Field(default=None, ge=1, le=10**15, description="stop after this many steps, counted over the whole job")
    seed: int = Field(default=1, ge=0, le=2**63 - 1, description="seed of shuffling, initial weights, augmentation and dropout")
    data: DataConfig = Field(default_factory=DataConfig)
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    recipe: RecipeConfig = Field(default_factory=RecipeConfig)
    norm: NormConfig = Field(default_factory=NormConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    def with_provenance(self, provenance: Mapping[str, str]) -> Config:
        """A copy which knows where these keys were set: {"batch.size": "configs/x.yaml:14"}; the others as here."""
        known = Provenance({**self._provenance, **provenance})
        copy = self.model_copy(update={name: getattr(self, name).model_copy() for name in SECTIONS})
        for section in (copy, *(getattr(copy, name) for name in SECTIONS)):
            section._provenance = known
        return copy


# The sections of Config, by key.
SECTIONS: dict[str, type[Section]] = {
    kind.section: kind
    for kind in (
        DataConfig,
        AugmentConfig,
        BatchConfig,
        ModelConfig,
        OptimConfig,
        RecipeConfig,
        NormConfig,
        CommConfig,
        SpeedConfig,
        StopConfig,
        CheckpointConfig,
        GuardConfig,
        LogConfig,
        ProfileConfig,
    )
}


@functools.cache
def known_keys() -> dict[str, FieldInfo]:
    """Every key of the schema: {"epochs": ..., "batch.size": ...}."""
    keys = {name: info for name, info in Config.model_fields.items() if name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{name}": info for name, info in kind.model_fields.items()}
    return keys


def takes_text(key: str) -> bool:
    """Whether the value of a key is a text: 'no', '007' and '1e3' are then neither numbers nor truth values."""
    return key in known_keys() and known_keys()[key].annotation in (str, str | None)

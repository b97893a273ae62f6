"""The one schema of everything a user can type. The text under each field is what `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# Sections whose name picks a file of a folder; keys that are not fields here are options of that file's build().
OPEN_SECTIONS = {"data": "data", "model": "models", "optim": "optim"}


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    name: str = "digits"
    """data set: digits (embedded), mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, synthetic"""
    root: str | None = None
    """folder that holds the data; where left out, the data set's own default"""
    sampling: Literal["global", "partition"] = "global"
    """global: each rank reads its slice of every global batch; partition: each epoch's shuffle is dealt out to the ranks first"""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchConfig:
    """How many samples a step takes."""

    size: int = 64
    """global batch: samples of one step, over all ranks"""
    micro: int | None = None
    """samples of one forward pass of one rank, at most; the gradients of a step's passes are summed"""
    evaluate: int = 500
    """samples of one forward pass of one rank in evaluation"""


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    name: str = "wide_resnet"
    """model: wide_resnet, resnet18 ... resnet152, mlp, linear, or package.module:Class of your own"""
    loss: Literal["cross_entropy", "squared_error"] = "cross_entropy"
    """cross_entropy of the softmax, or squared_error: half the squared distance to the one-hot label"""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    name: str = "sgd"
    """optimizer: sgd"""
    base_lr: float = 0.02
    """learning rate after the warm-up"""
    momentum: float = 0.9
    """momentum of the optimizer, 0 to 1"""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient as weight_decay x weight"""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeConfig:
    """How the numbers of a step change over the job."""

    warmup_epochs: float = 0.0
    """epochs over which the learning rate rises linearly, step by step, to base_lr"""


@dataclass(frozen=True)
class CommConfig:
    """How ranks talk."""

    engine: str = "auto"
    """auto, single, horovod or mpi; auto: under a launcher Horovod if it is installed, else mpi; without a launcher single"""
    reduce: Literal["auto", "distributed_optimizer", "bucket"] = "auto"
    """how gradients meet: hvd.DistributedOptimizer (auto's choice on Horovod), or own buckets overlapped with backward"""
    bucket_mb: float = 4.0
    """size of one gradient bucket (MiB)"""


@dataclass(frozen=True)
class SpeedConfig:
    """How one rank computes."""

    precision: Literal["fp32", "fp64"] = "fp32"
    """number type of weights and arithmetic"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of this rank's local rank where there is one"""


@dataclass(frozen=True)
class StopConfig:
    """When to stop before the last epoch."""

    target_accuracy: float | None = None
    """validation accuracy to reach, 0 to 1"""
    patience: int = 1
    """stop after this many epochs in a row at target_accuracy or above"""


@dataclass(frozen=True)
class CheckpointConfig:
    """What rank 0 writes at the end of each epoch."""

    keep_last: int = 2
    """checkpoints that stay in the run folder"""


@dataclass(frozen=True)
class LogConfig:
    """What is said on the way."""

    every_steps: int = 10
    """steps between two step events; each costs one small allreduce and a wait for the device"""
    every_s: float = 10.0
    """seconds between two progress lines inside an epoch, at least"""


@dataclass(frozen=True)
class Config:
    """The job."""

    frame: str = "torch"
    """framework inside a rank: torch, or numpy (the reference for linear models)"""
    run: str | None = None
    """run folder; where left out, runs/DATA-MODEL-TIME"""
    resume: str = "no"
    """no, or the run folder whose newest checkpoint to go on from"""
    epochs: int = 10
    """passes over the training set"""
    max_steps: int | None = None
    """stop after this many steps of the whole job"""
    seed: int = 1
    """seed of the shuffles, the initial weights and dropout"""
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


# The sections of Config, by key.
SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "batch": BatchConfig,
    "model": ModelConfig,
    "optim": OptimConfig,
    "recipe": RecipeConfig,
    "comm": CommConfig,
    "speed": SpeedConfig,
    "stop": StopConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}

# What each number must satisfy, and how a message says it. None (left out) always passes.
LIMITS: dict[str, tuple[float, float, str]] = {
    "epochs": (1, 1e9, "1 or more"),
    "max_steps": (1, 1e15, "1 or more"),
    "seed": (0, 2**63 - 1, "0 or more"),
    "batch.size": (1, 1e9, "1 or more"),
    "batch.micro": (1, 1e9, "1 or more"),
    "batch.evaluate": (1, 1e9, "1 or more"),
    "optim.base_lr": (0, 1e6, "0 or more"),
    "optim.momentum": (0, 1, "0 to 1"),
    "optim.weight_decay": (0, 1e6, "0 or more"),
    "recipe.warmup_epochs": (0, 1e9, "0 or more"),
    "comm.bucket_mb": (2**-10, 2**14, "1/1024 to 16384"),
    "stop.target_accuracy": (0, 1, "0 to 1"),
    "stop.patience": (1, 1e9, "1 or more"),
    "checkpoint.keep_last": (1, 1e9, "1 or more"),
    "log.every_steps": (1, 1e9, "1 or more"),
    "log.every_s": (0, 1e9, "0 or more"),
}

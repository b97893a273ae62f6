"""The one schema of everything a user can type, with config_run.py. The text under each field is what `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hvdtrain.config.schema_run import CheckpointConfig, CommConfig, GuardConfig, LogConfig, ProfileConfig, SpeedConfig, StopConfig

# Sections whose name picks a file of a folder; keys that are not fields here are options of that file's build().
OPEN_SECTIONS = {"data": "data/datasets", "model": "frameworks/torch/models", "optim": "optim"}

SHORTHANDS = {"speed=auto": "speed.precision=auto"}  # a word of the command line -> what it means: all else of speed is automatic anyway


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    name: str = "digits"
    """data set: digits (embedded), mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, webdataset, synthetic"""
    root: str | None = None
    """folder that holds the data; where left out, the data set's own default"""
    stage: str | None = None
    """folder on a disk of each node: one rank of a node copies the data there first, checked, and all its ranks read the copy"""
    sampling: Literal["global", "partition"] = "global"
    """global: each rank reads its slice of every global batch; partition: each epoch's shuffle is dealt out to the ranks first"""
    resident: bool | None = None
    """the training set stays on the device; where left out so on a GPU that has four times the room"""
    ahead: int | None = None
    """steps made ready while others are trained on; where left out one for each reader, 2 at least, but 0 of what is in memory"""
    readers: int | None = None
    """threads that read and decode for this rank; where left out its part of the cores, 8 at most"""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AugmentConfig:
    """How training images are changed, each by random numbers of its own: (seed, epoch, sample)."""

    crop: int = 0
    """a cut of the image's own size from the image with this many black pixels around it (CIFAR: 4)"""
    resized_crop: float = 0.0
    """a cut of at least this share of the area, 3/4 to 4/3 wide, brought to the image's size; 0: none (ImageNet: 0.08)"""
    flip: bool = False
    """every second image is mirrored, left to right"""
    cutout: int = 0
    """a square of this many pixels a side is blackened (DeVries 2017, arXiv:1708.04552)"""
    mixup: float = 0.0
    """alpha: each image and its label are mixed with another sample's, by a share from Beta(alpha, alpha) (Zhang 2017, arXiv:1710.09412)"""


@dataclass(frozen=True)
class BatchConfig:
    """How many samples a step takes."""

    size: int = 64
    """global batch: samples of one step, over all ranks"""
    per_rank: int | None = None
    """samples of one step on each rank: batch.size is then this times the number of ranks that the job starts with"""
    micro: int | None = None
    """samples of one forward pass of one rank, at most; the gradients of a step's passes are summed"""
    evaluate: int = 500
    """samples of one forward pass of one rank in evaluation"""


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    name: str = "wide_resnet"
    """model: wide_resnet, convnet, resnet18 ... resnet152, mlp, linear, or package.module:Class of your own"""
    loss: Literal["cross_entropy", "squared_error"] = "cross_entropy"
    """cross_entropy of the softmax, or squared_error: half the squared distance to the one-hot label"""
    label_smoothing: float = 0.0
    """share of the label spread over all classes in training, 0 to 1; validation loss is told without it"""
    classifier_std: float | None = None
    """start the last linear layer from a normal distribution of this deviation and bias 0 (Goyal 2017: 0.01); framework=torch"""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    name: str = "sgd"
    """optimizer: sgd, adam, adamw, lars, larc, lamb, novograd, or a torch.optim.Optimizer by its import path: torch.optim.RMSprop"""
    base_lr: float = 0.02
    """learning rate for a global batch of base_batch, after the warm-up"""
    base_batch: int | None = None
    """global batch that base_lr is meant for; where left out batch.size, so that only a batch that grows scales it"""
    momentum: float | None = None
    """momentum, or the first beta of Adam and its kin, 0 to 1; where left out the optimizer's own: 0.9, novograd 0.95"""
    weight_decay: float = 0.0
    """decay of the weights: added to the gradient as weight_decay x weight, or as the optimizer's own page says"""
    exclude: Literal["norms_and_biases", "none"] = "norms_and_biases"
    """parameters of at most one dimension are neither decayed nor scaled by lars, larc, lamb; none: they are like all others"""
    clip_norm: float | None = None
    """the mean gradient is scaled down to this Euclidean norm over all parameters where it is longer"""
    clip_value: float | None = None
    """each number of the mean gradient is cut to [-clip_value, clip_value], before clip_norm"""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PieceConfig:
    """One piece of a chain of schedules: an entry of recipe.chain."""

    kind: Literal["constant", "steps", "cosine", "polynomial", "exponential"] = "constant"
    """as recipe.schedule"""
    epochs: float | None = None
    """how long the piece lasts; the last piece may leave it out and goes to the end of the job"""
    scale: float = 1.0
    """where the piece begins, as a share of the scaled rate"""
    milestones: list[float] = field(default_factory=list)
    """as recipe.milestones, counted from the beginning of the piece"""
    gamma: float = 0.1
    """as recipe.gamma"""
    power: float = 2.0
    """as recipe.power"""
    end_lr: float = 0.0
    """as recipe.end_lr"""


@dataclass(frozen=True)
class RecipeConfig:
    """How the numbers of a step change over the job."""

    scale: Literal["linear", "sqrt", "none"] = "linear"
    """how the rate follows the global batch of a step: base_lr x B / base_batch, or x sqrt(B / base_batch), or not at all"""
    warmup: Literal["gradual", "constant", "none"] = "gradual"
    """gradual: the rate rises linearly, step by step, from warmup_from; constant: it stays at warmup_from, then jumps"""
    warmup_epochs: float = 0.0
    """length of the warm-up in epochs"""
    warmup_steps: int = 0
    """length of the warm-up in steps, instead of warmup_epochs"""
    warmup_from: float | None = None
    """rate at the beginning of the warm-up; where left out base_lr if scaling raises it, else 0"""
    schedule: Literal["constant", "steps", "cosine", "polynomial", "exponential"] = "constant"
    """the rate after the warm-up: steps multiplies it by gamma at each milestone; cosine and polynomial fall to end_lr at the last epoch"""
    milestones: list[float] = field(default_factory=list)
    """epochs, counted from the beginning of the job, at which schedule=steps multiplies the rate by gamma"""
    gamma: float = 0.1
    """factor of schedule=steps at each milestone, and of schedule=exponential in each epoch after the warm-up"""
    power: float = 2.0
    """of schedule=polynomial"""
    end_lr: float = 0.0
    """rate that cosine and polynomial end at"""
    chain: list[PieceConfig] = field(default_factory=list)
    """pieces {kind, epochs, scale, milestones, gamma, power, end_lr} one after the other, instead of schedule"""
    growth: Literal["none", "decays", "milestones"] = "none"
    """decays: where the schedule would divide the rate by a the batch grows a times, up to batch_max; milestones: by grow_at, grow_to"""
    batch_max: int | None = None
    """largest global batch of growth=decays; after it the rate decays"""
    grow_at: list[float] = field(default_factory=list)
    """epochs at which growth=milestones changes the global batch"""
    grow_to: list[int] = field(default_factory=list)
    """the global batch from each epoch of grow_at on"""
    adapt_regime: bool = False
    """train longer: every count of epochs in the recipe, and epochs itself, times ceil(batch.size / base_batch)"""
    sample_noise: float = 0.0
    """each sample's loss gets a random weight of mean 1 and variance sample_noise x (B / base_batch - 1); 1: the noise of base_batch"""
    gradient_noise: float = 0.0
    """eta of the noise added to the mean gradient, of variance eta / (1 + step)^0.55"""


@dataclass(frozen=True)
class NormConfig:
    """Which statistics the batch norm layers of a model use (framework=torch)."""

    kind: Literal["batch", "ghost", "sync"] = "batch"
    """batch: over a rank's samples of one forward pass; ghost: over each `ghost` of them; sync: over those of all ranks"""
    ghost: int = 128
    """samples of a ghost batch"""
    statistics: Literal["averaged", "sequential"] = "averaged"
    """running statistics of ghost batches: one update by their mean, or one update by each, as in Hoffer's own code"""


@dataclass(frozen=True)
class Config:
    """The job."""

    framework: str = "torch"
    """framework inside a rank: torch, jax, or numpy (the reference for linear models)"""
    run: str | None = None
    """run folder; where left out, runs/DATA-MODEL-TIME"""
    resume: str = "auto"
    """auto: go on from the newest good checkpoint of run= if it has one; no: begin anew; or a run folder, with its configuration"""
    epochs: int = 10
    """passes over the training set"""
    max_steps: int | None = None
    """stop after this many steps of the whole job"""
    seed: int = 1
    """seed of the shuffles, the initial weights and dropout"""
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    norm: NormConfig = field(default_factory=NormConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


# The sections of Config, by key.
SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "augment": AugmentConfig,
    "batch": BatchConfig,
    "model": ModelConfig,
    "optim": OptimConfig,
    "recipe": RecipeConfig,
    "norm": NormConfig,
    "comm": CommConfig,
    "speed": SpeedConfig,
    "stop": StopConfig,
    "checkpoint": CheckpointConfig,
    "guard": GuardConfig,
    "log": LogConfig,
    "profile": ProfileConfig,
}

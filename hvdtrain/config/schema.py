"""Every key that a user can set: type, default, bounds, and the description that `--help` and
editors show."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator
from pydantic.fields import FieldInfo

from hvdtrain.config.extra_keys import with_keys_of_extras, with_sections_of_extras
from hvdtrain.config.extras import data_files
from hvdtrain.config.lengths import LengthValue, PositiveLength, as_given
from hvdtrain.config.section import OpenSection, Provenance, Section

# Sections whose name picks a file of a folder; keys that are not fields here are options of that
# file's build().
OPEN_SECTIONS = {
    "data": "data/datasets",
    "task": "tasks",
    "model": "frameworks/torch/models",
    "optim": "optim",
}

# an argument -> what it stands for: the other keys of speed are automatic already
SHORTHANDS = {"speed=auto": "speed.precision=auto"}

DEFAULT_EPOCHS = 10
# of the same key: read everywhere, never written
OTHER_NAMES = {
    "stop.epochs": "epochs",
    "max_steps": "stop.steps",
}


@with_keys_of_extras
class DataConfig(OpenSection):
    """The data set, and how samples reach the ranks."""

    section = "data"
    name: str = Field(
        default="digits",
        description="data set: digits (embedded), mnist, fashion_mnist, kmnist, cifar10, "
        "cifar100, folder, webdataset, synthetic, "
        "image_tokens, text; files of science: "
        f"{', '.join(dict.fromkeys([*data_files().values(), 'parquet', 'csv', 'npz']))}; or "
        "package.module:function of your own",
    )
    root: str | None = Field(
        default=None, description="folder that holds the data; default: the data set's own"
    )
    stage: str | None = Field(
        default=None,
        description="folder on a local disk of each node: one rank per node copies the data there "
        "and verifies it, and every rank "
        "of the node reads the copy",
    )
    val_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the training set that validates instead of the data set's own "
        "validation set: of each class this share "
        "of its samples, the same ones in every run",
    )
    mean: list[float] = Field(
        default_factory=list,
        description="mean of each channel of images, of pixels / 255, in place of the training "
        "set's: that of the images that "
        "model.weights were trained with: [0.485,0.456,0.406]",
    )
    std: list[float] = Field(
        default_factory=list,
        description="deviation of each channel, with data.mean: [0.229,0.224,0.225]",
    )
    inputs: list[str] = Field(
        default_factory=list,
        description="fields of the data that a model of your own gets, by the names of its "
        "forward()'s parameters, else as a dict: "
        "[image,table]; default: those that forward() has required parameters for, or x",
    )
    pad: dict[str, float] = Field(
        default_factory=dict,
        description="fields whose samples have different lengths, and what stands behind the "
        "shorter ones of a pass, which are padded to "
        "its longest: {tokens: 0}; a field tokens_mask tells which are real (framework=torch; "
        "data of your own)",
    )
    mask: dict[str, str] = Field(
        default_factory=dict, description="other names for the masks of data.pad: {tokens: mask}"
    )
    bucket_by: str | None = Field(
        default=None,
        description="length: of the samples of a step those of similar length come into one pass; "
        "or another field of data.pad, whose "
        "lengths count; default: they come in the order of the shuffle",
    )
    pack: int | None = Field(
        default=None,
        ge=2,
        le=2**26,
        description="rows of so many tokens, the samples of the job, into which the sequences of "
        "the field tokens are packed "
        "(task.name=language, framework=torch; data of your own)",
    )
    class_names: list[str] | None = Field(
        default=None,
        description="name of each class, by label; default: the data set's own (a job records "
        "them in config.yaml)",
    )
    sampling: Literal["global", "partition"] = Field(
        default="global",
        description="global: each rank reads its slice of every global batch; "
        "partition: each epoch's shuffled samples are divided among the ranks first",
    )
    shuffle: Literal["full", "blocks"] = Field(
        default="full",
        description="full: one shuffle of all samples for each epoch; blocks: blocks of "
        "neighbouring samples are shuffled, and the samples "
        "of each data.shuffle_window of them: for files whose samples are slow to read one by one",
    )
    shuffle_block: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="samples of a block; default: those that the files have in a chunk or row "
        "group, else 256",
    )
    shuffle_window: int = Field(
        default=16, ge=1, le=2**20, description="blocks whose samples are shuffled among each other"
    )
    sample_weights: str | None = Field(
        default=None,
        description="draw samples with replacement, in proportion to a field of theirs, as "
        "`weight`; balanced: by the inverse frequency of "
        "their class y; default: each sample once in an epoch",
    )
    resident: bool | None = Field(
        default=None,
        description="keep the training set on the device; default: on a GPU with four times the "
        "room",
    )
    ahead: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="steps prefetched during training; default: one per reader, at least 2, and 0 "
        "for data that is in memory",
    )
    readers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="threads that read and decode for this rank; default: its share of the cores, "
        "at most 8",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="processes that read for this rank and each set: image files with "
        "data.packed=false and files of science, by default 0 "
        "(threads decode); "
        "a torch Dataset of your own, by default num_workers of its DataLoader, else 0 (the rank "
        "reads its samples itself, between steps)",
    )


@with_keys_of_extras
class TaskConfig(OpenSection):
    """What is learned: the loss, the metrics, and the one of them that stop.target speaks of."""

    section = "task"
    name: str = Field(
        default="classification",
        description="task: classification (images of classes), multilabel (several labels), "
        "segmentation (classes of pixels), "
        "regression (numbers), language (the next token), or package.module:build of your own",
    )


@with_keys_of_extras
class AugmentConfig(Section):
    """Augmentation of training images; the random numbers of an image depend on (seed, epoch,
    sample) only."""

    section = "augment"
    crop: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="random crop of the image's own size after padding with this many pixels on "
        "each side (CIFAR: 4)",
    )
    pad: Literal["zeros", "reflect"] = Field(
        default="zeros",
        description="what augment.crop pads with: zeros: black pixels; reflect: the image "
        "mirrored at its borders, without the pixels of "
        "the border (Jordan 2024, arXiv:2404.00498)",
    )
    resized_crop: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="random crop of at least this share of the area, aspect ratio 3/4 to 4/3, "
        "resized to the image's size; of image files "
        "(data.packed=false) and archives from the whole image, else from the stored one; 0: off "
        "(ImageNet: 0.08)",
    )
    flip: bool | Literal["alternating"] = Field(
        default=False,
        description="true: mirror an image left to right with probability 1/2, in each epoch "
        "anew; alternating: in every second epoch, in "
        "the first one with probability 1/2 (Jordan 2024, arXiv:2404.00498)",
    )
    cutout: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="black out a square with this side length in pixels (DeVries 2017, "
        "arXiv:1708.04552)",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha: mix each image and its label with another sample's, in a proportion "
        "drawn from Beta(alpha, alpha) "
        "(Zhang 2017, arXiv:1710.09412)",
    )
    cutmix: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha: paste a box of another sample into each image, or mask, and mix "
        "labels by areas; the share outside of the box "
        "is drawn from Beta(alpha, alpha) (Yun 2019, arXiv:1905.04899). With augment.mixup each "
        "sample has either, with probability 1/2",
    )
    rand_augment: int = Field(
        default=0,
        ge=0,
        le=16,
        description="operations on each image, one after the other, each drawn from 14 "
        "(RandAugment: Cubuk 2020, arXiv:1909.13719): 2",
    )
    magnitude: int = Field(
        default=9,
        ge=0,
        le=30,
        description="of augment.rand_augment, as torchvision counts: 30 is a rotation of 30 "
        "degrees, a shear of 0.3",
    )
    color_jitter: list[Annotated[float, Field(ge=0, le=10)]] = Field(
        default_factory=list,
        max_length=4,
        description="widths of random brightness, contrast, saturation, hue, as of torchvision's "
        "ColorJitter, in a random order, after "
        "augment.rand_augment: [0.4,0.4,0.4,0.1]",
    )
    erase: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="probability of a box of random pixels, of 2 to 33 % of the image (Zhong "
        "2017, arXiv:1708.04896)",
    )


@with_keys_of_extras
class BatchConfig(Section):
    """Samples per step."""

    section = "batch"
    size: int = Field(
        default=64,
        ge=1,
        le=10**9,
        description="global batch: samples per step, summed over all ranks",
    )
    per_rank: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="samples per step on each rank, instead of batch.size: batch.size becomes "
        "this times the number of ranks at the "
        "start of the job",
    )
    micro: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] | None = Field(
        default=None,
        description="largest number of samples in one forward pass of one rank; gradients of a "
        "step's passes are accumulated; "
        "auto: as many as fit into the rank's memory, by prediction",
    )
    evaluate: int = Field(
        default=500,
        ge=1,
        le=10**9,
        description="samples in one forward pass of one rank during evaluation",
    )


class ThawConfig(Section):
    """Frozen weights that are trained from a length on: an entry of model.thaw."""

    section = "model.thaw"
    at: PositiveLength = Field(description="length, as recipe.warmup, after which they are trained")
    names: list[str] = Field(
        min_length=1,
        description="names of weights that model.freeze has, with * for any characters",
    )


@with_keys_of_extras
class ModelConfig(OpenSection):
    """The model and its loss."""

    section = "model"
    name: str = Field(
        default="wide_resnet",
        description="model: wide_resnet, convnet, airbench, alexnet, resnet18 ... resnet152, gpt, "
        "mlp, linear, timm:NAME, "
        "transformers:FOLDER, or package.module:Class of your own",
    )
    loss: Literal["cross_entropy", "squared_error"] = Field(
        default="cross_entropy",
        description="cross_entropy: of the softmax; squared_error: half the squared distance to "
        "the one-hot label",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the label spread over all classes in training; validation loss is "
        "computed without it",
    )
    classifier_std: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="standard deviation of the last linear layer's initial weights, with bias 0 "
        "(Goyal 2017: 0.01); framework=torch only",
    )
    recompute: Literal["none", "all"] | Annotated[int, Field(ge=1, le=10**6)] = Field(
        default="none",
        description="activation checkpointing: all: the model's blocks keep no activations, the "
        "backward pass computes them again; "
        "N: every N-th block; none: all are kept",
    )
    weights: str | None = Field(
        default=None,
        description="pretrained weights that a new job begins with: model.safetensors, model.pt, "
        "a run folder, or a folder with "
        "model.safetensors",
    )
    download: bool = Field(
        default=False,
        description="whether a model's own code may download weights through torch.hub, as "
        "torchvision's does, or from the Hugging Face "
        "Hub (framework=torch)",
    )
    freeze: list[str] = Field(
        default_factory=list,
        description="weights that are not trained, and norms whose running statistics stay: "
        "names, with * for any characters: "
        "['backbone.*'] (framework=torch)",
    )
    thaw: list[ThawConfig] = Field(
        default_factory=list,
        description="frozen weights, and running statistics of their norms, that are trained "
        "later: [{at: 2, names: ['backbone.*']}]",
    )
    lora: list[str] = Field(
        default_factory=list,
        description="linear layers that get a low-rank adapter: names, with * for any characters: "
        "['blocks.*.fc1'] (framework=torch); "
        "all other weights are frozen but those of model.lora_train and model.weights_skip",
    )
    lora_train: list[str] = Field(
        default_factory=list,
        description="weights and running statistics that are trained beside the adapters of "
        "model.lora: names, with * for any characters: "
        "['head.*']; never those of the layers with an adapter",
    )
    lora_rank: int = Field(
        default=8, ge=1, le=10**6, description="rank of each adapter of model.lora"
    )
    lora_alpha: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="an adapter counts lora_alpha / lora_rank; default: 1",
    )
    lora_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout of what an adapter gets"
    )
    weights_skip: list[str] = Field(
        default_factory=list,
        description="weights that begin as without model.weights: names, with * for any "
        "characters: ['fc.*']",
    )
    weights_names: list[str] = Field(
        default_factory=list,
        description="OLD=NEW: the names of the file that begin with OLD begin with NEW in the "
        "model: ['backbone.=']; with * whole names: "
        "['encoder.layer.*.query.*=layers.*.q_proj.*']",
    )

    @property
    def lora_scale(self) -> float:
        """What an adapter of model.lora is multiplied by."""
        return (self.lora_rank if self.lora_alpha is None else self.lora_alpha) / self.lora_rank


class GroupConfig(Section):
    """Parameters with a rate, a decay or a momentum of their own: an entry of optim.groups."""

    section = "optim.groups"
    names: str = Field(
        min_length=1,
        description="names of parameters, with * for any characters, ? for one, # for the number "
        "of a layer: '*.bias'",
    )
    rate: float = Field(
        default=1.0, ge=0, le=1e6, description="their learning rate, times that of the others"
    )
    layer_rate: float | None = Field(
        default=None,
        gt=0,
        le=1e3,
        description="with # in names: the rate of a layer, times that of the layer behind it: 0.75",
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="with layer_rate: how many layers there are, numbered from 0",
    )
    decay: float = Field(
        default=1.0, ge=0, le=1e6, description="their weight decay, times that of the others"
    )
    momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="their momentum, or first beta; default: that of the others",
    )


@with_keys_of_extras
class OptimConfig(OpenSection):
    """The optimizer."""

    section = "optim"
    name: str = Field(
        default="sgd",
        description="optimizer: sgd, adam, adamw, lars, larc, lamb, novograd, muon, or a "
        "torch.optim.Optimizer by its import path: "
        "torch.optim.RMSprop (not LBFGS, whose step computes the loss again)",
    )
    base_lr: float = Field(
        default=0.02,
        ge=0,
        le=1e6,
        description="learning rate for a global batch of base_batch, after the warm-up",
    )
    base_batch: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="global batch that base_lr belongs to; default: batch.size, so that only a "
        "growing batch scales the rate",
    )
    momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="momentum, or the first beta of Adam-like optimizers; default: the "
        "optimizer's own, 0.9 or 0.95 for novograd and muon",
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="weight decay: weight_decay x weight is added to the gradient, or as the "
        "optimizer defines it; default: 0, or that of "
        "the class, for all parameters, where optim.name is an import path",
    )
    exclude: Literal["norms_and_biases", "none"] = Field(
        default="norms_and_biases",
        description="norms_and_biases: parameters with at most one dimension are not decayed and "
        "not scaled by lars, larc, lamb; "
        "none: all are",
    )
    groups: list[GroupConfig] = Field(
        default_factory=list,
        description="parameters with a rate, a decay or a momentum of their own, by their names: "
        "a list of {names, rate, decay, momentum}, "
        "as in [{names: '*.bias', rate: 64}]; of several entries that a name fits the first counts",
    )
    ema: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay of an exponential moving average of the weights, one update a step, as "
        "in 0.999: evaluations, predict, "
        "sample and export use it in the place of the weights (Polyak and Juditsky 1992)",
    )
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        le=1e30,
        description="largest Euclidean norm of the mean gradient over all parameters; a longer "
        "gradient is scaled down",
    )
    clip_value: float | None = Field(
        default=None,
        gt=0,
        le=1e30,
        description="clamp each element of the mean gradient to [-clip_value, clip_value], before "
        "clip_norm",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_decay(cls, tree: Any) -> Any:
        """None where a class of the user's may have its own."""
        if (
            not isinstance(tree, dict)
            or tree.get("weight_decay") is not None
            or {".", ":"} & set(str(tree.get("name", "")))
        ):
            return tree
        return tree | {"weight_decay": 0.0}

    @property
    def decay(self) -> float:
        """What hvdtrain tells the optimizer: 0 where weight_decay is not set, and a class keeps its
        own."""
        return self.weight_decay or 0.0


Schedule = Literal["constant", "steps", "cosine", "linear", "polynomial", "exponential"]


class PieceConfig(Section):
    """One piece of a chain of schedules: an entry of recipe.chain."""

    section = "recipe.chain"
    kind: Schedule = Field(default="constant", description="as recipe.schedule")
    length: PositiveLength | None = Field(
        default=None,
        description="length of the piece, as recipe.warmup; the last piece may leave it out and "
        "then lasts to the end of the job",
    )
    scale: float = Field(
        default=1.0,
        ge=0,
        description="rate at the beginning of the piece, as a share of the scaled rate",
    )
    milestones: list[LengthValue] = Field(
        default_factory=list,
        description="as recipe.milestones, counted from the beginning of the piece",
    )
    gamma: float = Field(default=0.1, ge=0, le=1e3, description="as recipe.gamma")
    power: float = Field(default=2.0, ge=0, le=100, description="as recipe.power")
    end_lr: float = Field(default=0.0, ge=0, le=1e6, description="as recipe.end_lr")


@with_keys_of_extras
class RecipeConfig(Section):
    """How learning rate, batch and noise change over the job."""

    section = "recipe"
    scale: Literal["linear", "sqrt", "none"] = Field(
        default="linear",
        description="how the rate depends on the global batch B: linear: base_lr x B / base_batch; "
        "sqrt: base_lr x sqrt(B / base_batch); none: base_lr",
    )
    warmup: LengthValue = Field(
        default=0,
        description="length of the warm-up: a number of epochs, or '500 steps', '1e6 samples', "
        "'2e8 tokens', '10%' of the job",
    )
    warmup_kind: Literal["gradual", "constant"] = Field(
        default="gradual",
        description="gradual: the rate rises linearly with each step from warmup_from; constant: "
        "it stays at warmup_from, then jumps",
    )
    warmup_from: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="rate at the beginning of the warm-up; default: base_lr if scaling raises it, "
        "else 0",
    )
    schedule: Literal[Schedule, "one_cycle", "plateau"] = Field(
        default="constant",
        description="the rate after the warm-up: constant; steps: times gamma at each milestone; "
        "exponential: times gamma in each epoch; "
        "cosine, linear, polynomial: falling to end_lr at the end of the job (epochs, stop.steps); "
        "one_cycle: up from a 25th of the rate over 30% of the job, and down to a 250,000th, as "
        "torch's OneCycleLR; "
        "plateau: times gamma where evaluations bring no better value of the task's objective, as "
        "torch's ReduceLROnPlateau",
    )
    function: str | None = Field(
        default=None,
        description="your own schedule in the place of recipe.schedule, package.module:function: "
        "of the share of the job that is done, "
        "0 to 1, the factor of the rate",
    )
    cycle_momentum: list[float] = Field(
        default_factory=list,
        max_length=2,
        description="[0.85, 0.95]: with schedule=one_cycle the momentum falls to the first while "
        "the rate rises, and rises to the second",
    )
    milestones: list[LengthValue] = Field(
        default_factory=list,
        description="lengths as recipe.warmup, from the beginning of the job, after which "
        "schedule=steps multiplies the rate by gamma",
    )
    gamma: float = Field(
        default=0.1,
        ge=0,
        le=1e3,
        description="factor of the rate at each milestone of schedule=steps, for each epoch after "
        "the warm-up with "
        "schedule=exponential, and where schedule=plateau lowers it",
    )
    power: float = Field(default=2.0, ge=0, le=100, description="exponent of schedule=polynomial")
    end_lr: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="final rate of schedule=cosine, linear and polynomial, and the lowest of "
        "plateau",
    )
    patience: int = Field(
        default=10,
        ge=0,
        le=10**9,
        description="evaluations in a row without a better one that schedule=plateau ignores: the "
        "next one lowers the rate",
    )
    threshold: float = Field(
        default=1e-4,
        ge=0,
        le=1e30,
        description="by more than this a value is better than the best one, with schedule=plateau",
    )
    threshold_mode: Literal["rel", "abs"] = Field(
        default="rel",
        description="rel: the threshold is a share of the best value; abs: a difference",
    )
    cooldown: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="evaluations after schedule=plateau has lowered the rate that do not count as "
        "without a better one",
    )
    floor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the scaled rate below which no schedule falls after the warm-up: "
        "0.1 with schedule=cosine is minGPT's",
    )
    chain: list[PieceConfig] = Field(
        default_factory=list,
        description="schedules one after the other from the end of the warm-up on, instead of "
        "recipe.schedule: a list of {kind, length, "
        "scale, milestones, gamma, power, end_lr}",
    )
    growth: Literal["none", "decays", "milestones"] = Field(
        default="none",
        description="none: the batch stays; decays: where the schedule would divide the rate by "
        "a, the batch is multiplied by a, "
        "up to batch_max; milestones: as grow_at and grow_to say",
    )
    batch_max: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="largest global batch of growth=decays; once it is reached, the rate decays",
    )
    grow_at: list[LengthValue] = Field(
        default_factory=list,
        description="lengths as recipe.warmup, after which growth=milestones changes the global "
        "batch",
    )
    grow_to: list[int] = Field(
        default_factory=list, description="global batch from each of grow_at on"
    )
    adapt_regime: bool = Field(
        default=False,
        description="train longer: multiply epochs and every count of epochs in the recipe by "
        "ceil(batch.size / base_batch)",
    )
    sample_noise: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="weight each sample's loss randomly, with mean 1 and variance sample_noise x "
        "(B / base_batch - 1); "
        "1 gives the gradient noise of base_batch",
    )
    gradient_noise: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="eta: add noise of variance eta / (1 + step)^0.55 to the mean gradient",
    )


@with_keys_of_extras
class NormConfig(Section):
    """Statistics of the model's batch norm layers (framework=torch or jax)."""

    section = "norm"
    kind: Literal["batch", "ghost", "sync"] = Field(
        default="batch",
        description="batch: statistics of one rank's forward pass; ghost: of each `ghost` samples "
        "of it; sync: of all ranks' samples",
    )
    ghost: int = Field(default=128, ge=1, le=10**9, description="samples in a ghost batch")
    statistics: Literal["averaged", "sequential"] = Field(
        default="averaged",
        description="running statistics of ghost batches: averaged: one update by their mean; "
        "sequential: one update by each, as in Hoffer's code",
    )


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


@with_keys_of_extras
class ShardConfig(Section):
    """What each rank holds of the training state."""

    section = "shard"
    stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="ZeRO (Rajbhandari 2020, arXiv:1910.02054): 0: every rank has everything; 1: "
        "each rank has its part of the optimizer "
        "state; 2: and of the gradients, also between micro-batches; 3: and of the weights, with "
        "one block of the model's `blocks` whole "
        "at a time (framework=torch: FSDP2, not on horovod)",
    )
    group: Literal["all", "node"] = Field(
        default="all",
        description="all: parts over all ranks; node: over the ranks of each host, with copies on "
        "the others, between which only sums of "
        "parts travel (HSDP); every host has equally many ranks",
    )
    reshard: bool = Field(
        default=True,
        description="of stage 3: false keeps whole weights from forward to backward: more memory, "
        "a third less communication",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="none: a GPU has everything; optimizer: each rank's optimizer state and its "
        "update are in host memory; "
        "parameters (stage 3): and its parts of the weights. On a CPU nothing moves",
    )


@with_keys_of_extras
class ParallelConfig(Section):
    """How the layers of one model are divided among ranks; the rest of the ranks is data
    parallel."""

    section = "parallel"
    dividing: ClassVar[tuple[str, ...]] = ("pipeline", "tensor")
    tensor: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="ranks that compute each layer together, each a part of its neurons and heads "
        "(Shoeybi 2019, arXiv:1909.08053); they "
        "read the same samples, and exchange activations in every layer: keep them inside a host. "
        "For models with a plan: gpt, mlp",
    )
    sequence: bool = Field(
        default=False,
        description="with parallel.tensor: between the layers that are cut each rank has its part "
        "of the positions of each sample, in "
        "norms, dropout and shortcuts, which every rank of a group computes whole without it "
        "(Korthikanti 2022, arXiv:2205.05198): less "
        "memory of activations, the same results. For models whose plan has it: gpt",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="ranks that have the layers of a model one after the other, through which a "
        "step's micro-batches go; they read the "
        "same samples. For gpt, mlp, a torch.nn.Sequential and models with pipeline_units() "
        "(framework=torch)",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        default="1f1b",
        description="order of a pipeline's passes: gpipe: all forward, then all backward (Huang "
        "2019, arXiv:1811.06965); 1f1b: backward as "
        "soon as can be, with fewer activations (Narayanan 2019, arXiv:1806.03377); interleaved: "
        "several stages on each rank (Narayanan "
        "2021, arXiv:2104.04473); zero_bubble: gradients of weights fill the gaps (Qi 2023, "
        "arXiv:2401.10241)",
    )
    virtual: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="stages of a rank with parallel.schedule=interleaved; default 2, with other "
        "schedules 1",
    )
    micro_batches: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="micro-batches of a step, of the ranks of a pipeline; default: 2 x "
        "parallel.pipeline, or what batch.micro gives",
    )
    balance: Literal["operations", "seconds"] | list[PositiveInt] = Field(
        default="operations",
        description="where a pipeline's model is cut, so that the slowest stage is as fast as can "
        "be: operations: by the floating-point "
        "operations of each unit, the same in every run; seconds: by its time, as rank 0 measures "
        "it at the start; [3, 2]: units of each "
        "stage; `hvdtrain plan --pipeline` shows all",
    )

    @field_validator("balance", mode="before")
    @classmethod
    def _as_on_the_command_line(cls, balance: Any) -> Any:
        """3,2 is [3, 2], and 3 is [3]."""
        if isinstance(balance, str) and all(
            part.strip().isdecimal() for part in balance.split(",")
        ):
            balance = [int(part) for part in balance.split(",")]
        elif type(balance) is int:
            balance = [balance]
        is_list = (
            isinstance(balance, list)
            and balance
            and all(type(units) is int and units >= 1 for units in balance)
        )
        if not is_list and balance not in ("operations", "seconds"):
            raise ValueError(
                "parallel.balance takes operations, seconds, or the units of each stage, each 1 "
                "or more, as in 3,2"
            )
        return balance

    @property
    def ranks(self) -> int:
        """That have one model together, and read the same samples."""
        return self.tensor * self.pipeline

    @property
    def stages_of_rank(self) -> int:
        return self.virtual or (2 if self.schedule == "interleaved" else 1)

    def readers_of(self, ranks: int) -> int:
        return ranks // self.ranks

    @property
    def needed_of_engine(self) -> frozenset[str]:
        return frozenset({"p2p"} if self.pipeline > 1 else ())

    def summary(self) -> str:
        """parallel.tensor=2, or parallel.pipeline=2 x parallel.tensor=2"""
        sizes = {"pipeline": self.pipeline, "tensor": self.tensor}
        return " x ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def cut_by(self) -> str:
        """The key by which ranks have parts of layers; empty where each has whole ones."""
        return next((key for key in ("tensor", "pipeline") if getattr(self, key) > 1), "")

    @property
    def cuts(self) -> bool:
        """Whether ranks have parts of parameters, and of the optimizer's state."""
        return bool(self.cut_by)

    @property
    def highest_stage(self) -> int:
        """The highest shard.stage that goes with them."""
        return 2 if self.pipeline > 1 else 3

    @property
    def may_recompute(self) -> bool:
        """Whether model.recompute goes with them."""
        return self.schedule != "zero_bubble"

    @property
    def may_divide_passes(self) -> bool:
        """Whether batch.micro goes with them."""
        return True


@with_keys_of_extras
class SpeedConfig(Section):
    """How each rank computes."""

    section = "speed"
    precision: Literal["auto", "fp32", "fp64", "bf16", "fp16"] = Field(
        default="fp32",
        description="number type: fp32, fp64; bf16, fp16: weights stay in fp32, layers compute in "
        "16 bits; "
        "auto: bf16 where the device supports it in hardware",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="cpu; cuda: the GPU with this rank's local rank; auto: that GPU if there is "
        "one, else the CPU",
    )
    devices: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="devices of each rank, which divide the rows of its batches and have equal "
        "weights (framework=jax)",
    )
    channels_last: bool | None = Field(
        default=None,
        description="channels-last memory format for images; default: yes for built-in models, no "
        "for a class of your own "
        "(framework=torch)",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        default="none",
        description="torch.compile's mode: default, reduce-overhead (CUDA graphs) or "
        "max-autotune; none: not compiled (framework=torch)",
    )
    deterministic: bool = Field(
        default=False,
        description="on a GPU: only kernels that give the same bits each time, so that a resumed "
        "job equals one that never stopped to the "
        "last bit; slower. A CPU's always do (framework=torch)",
    )


@with_keys_of_extras
class EvaluateConfig(Section):
    """Evaluations on the validation set, besides those at the end of each epoch and of the job."""

    section = "evaluate"
    every_steps: int | None = Field(
        default=None, ge=1, le=10**15, description="steps between two evaluations within an epoch"
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="evaluate only so many samples of the validation set: the same ones each time "
        "and on any number of ranks, drawn by "
        "the seed",
    )
    views: Literal[1, 2, 6] = Field(
        default=1,
        description="test-time augmentation: what the model says of an image is the mean of its "
        "outputs for so many views: 2: the image "
        "and its mirror image; 6: these two with weight 1/4 each, and both shifted by a pixel up "
        "and left, and down and right, 1/8 each "
        "(Jordan 2024, arXiv:2404.00498). An evaluation takes so many forward passes. For "
        "task.name=classification of images",
    )


@with_keys_of_extras
class StopConfig(Section):
    """When the job is done: after `epochs` (or stop.epochs, the same key), stop.steps, stop.time,
    stop.target or stop.patience."""

    section = "stop"
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**15,
        description="steps of the whole job, over all its runs: the length that its schedules "
        "have, where it is reached before `epochs`",
    )
    time: str | None = Field(
        default=None,
        description="time of the whole job, over all its runs, at which it is done: 90 (seconds), "
        "45m, 3.5h, 1:30:00; as the clock of "
        "rank 0 has it at a sync point. Where only time ends the job, no schedule can count "
        "shares of it (guard.max_time stops one run, "
        "to be resumed)",
    )
    target: float | None = Field(
        default=None,
        ge=-1e30,
        le=1e30,
        description="value of the task's objective at which the job stops: validation accuracy, "
        "with task.name=classification",
    )
    target_for: int = Field(
        default=1,
        ge=1,
        le=10**9,
        description="stop only after this many consecutive evaluations at stop.target or better",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="evaluations in a row without a better value of the task's objective "
        "(validation accuracy) after which the job stops",
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        le=1e30,
        description="by more than this a value is better than the one that stop.patience counts "
        "from",
    )
    restore_best: bool = Field(
        default=False,
        description="keep the checkpoint of the best evaluation: its weights are those of the "
        "script's model at the end of the job, and of "
        "export, evaluate, predict and sample",
    )


@with_keys_of_extras
class CheckpointConfig(Section):
    """When rank 0 writes checkpoints, besides after each evaluation and at the end of the job."""

    section = "checkpoint"
    every_steps: int | None = Field(
        default=None, ge=1, le=10**15, description="steps between two checkpoints"
    )
    every_minutes: float | None = Field(
        default=10.0,
        ge=0,
        le=1e9,
        description="longest time between two checkpoints in minutes; written at the next sync "
        "point (log.every_steps)",
    )
    every: Literal["auto"] | None = Field(
        default=None,
        description="auto: the time between two checkpoints that costs least (Young 1974, Daly "
        "2006), by what a checkpoint costs and "
        "guard.mtbf_hours; at most every_minutes, at least 10 s and 10 times what a checkpoint "
        "takes",
    )
    keep_last: int = Field(
        default=2, ge=1, le=10**9, description="number of newest checkpoints kept in the run folder"
    )
    keep_best: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="number of the best checkpoints kept as well, by the task's objective "
        "(validation accuracy)",
    )


@with_keys_of_extras
class GuardConfig(Section):
    """Time limit, stall detection, and checks of the job's health."""

    section = "guard"
    max_time: str | None = Field(
        default=None,
        description="stop with a checkpoint before the job has run this long: 90 (seconds), 45m, "
        "3.5h, 1:30:00, 2-00:00:00; "
        "also --max-time",
    )
    stall_s: float | None = Field(
        default=300.0,
        ge=1,
        le=1e9,
        description="seconds without progress after which the job ends with a report of the ranks "
        "that are behind; null: wait forever",
    )
    start_s: float | None = Field(
        default=600.0,
        ge=1,
        le=1e9,
        description="the same until the first steps are done (start of MPI, reading data, "
        "building, compiling), and for the last "
        "checkpoint",
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a loss or gradient is not finite: stop the job; skip the step; "
        "or rollback to the newest checkpoint and continue with the data after it",
    )
    lost: Literal["stop", "shrink", "restart"] = Field(
        default="stop",
        description="when a rank dies: stop: all ranks end; shrink: the others go on without it "
        "from the last sync point; restart: the "
        "others write a checkpoint of the last sync point and end with exit code 84. Both need "
        "mpirun --with-ft ulfm, or "
        "comm.engine=torchdist with a launcher that leaves the other ranks alone (docs/elastic.md)",
    )
    mtbf_hours: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="mean time between two faults of the whole job in hours, for "
        "checkpoint.every=auto; null: as seen in this run so far, "
        "and one in 24 hours",
    )
    nonfinite_limit: int = Field(
        default=20,
        ge=0,
        le=10**9,
        description="number of skipped steps or rollbacks after which the job stops",
    )
    equal_steps: int | None = Field(
        default=100,
        ge=1,
        le=10**15,
        description="steps between two comparisons of weights, buffers, optimizer state, lr and "
        "step across all ranks; null: never",
    )

    @property
    def needed_of_engine(self) -> frozenset[str]:
        return frozenset({"shrink"} if self.lost != "stop" else ())


@with_keys_of_extras
class LogConfig(Section):
    """What is logged, and how often."""

    section = "log"
    every_steps: int = Field(
        default=10,
        ge=1,
        le=10**9,
        description="steps between two sync points, where all ranks sum metrics, react to signals "
        "and write checkpoints; "
        "costs a wait for the device",
    )
    every_s: float = Field(
        default=10.0,
        ge=0,
        le=1e9,
        description="shortest time between two progress lines within an epoch in seconds; a live "
        "display updates once a second",
    )
    display: Literal["auto", "live", "lines"] = Field(
        default="auto",
        description="live: a display that updates in place; lines: plain lines, suited to a file; "
        "auto: live if rank 0 writes to an interactive terminal",
    )
    per_rank: bool = Field(
        default=False,
        description="each rank writes its times and warnings to RUN/ranks/rank-00000.log",
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="trackers that record the metrics besides RUN/events.jsonl: tensorboard, "
        "mlflow, wandb",
    )
    targets: list[float] = Field(
        default_factory=list,
        description="values of the task's objective (validation accuracy) for which time, epochs, "
        "images and joules are reported when "
        "first reached, as for stop.target",
    )
    step_times: bool = Field(
        default=False,
        description="write an event per step with the time of each phase and the slowest rank; "
        "costs one small allgather per sync point",
    )
    samples: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="images or texts that are drawn before the first step and at each evaluation, "
        "always from the same random numbers, "
        "into RUN/samples and the report (task.name=language), or samples whose masks are shown "
        "(segmentation; default: 4 at the end)",
    )
    noise_scale: bool = Field(
        default=False,
        description="measure and log the gradient noise scale and the critical batch size that "
        "follows from it; needs at least two ranks",
    )


@with_keys_of_extras
class ProfileConfig(Section):
    """Traces of single steps; HOROVOD_TIMELINE=FILE in the environment makes Horovod write its own
    timeline as well."""

    section = "profile"
    steps: str | None = Field(
        default=None,
        description="A:B traces the steps after step A up to step B on every rank into "
        "RUN/profile/rank-00000/, for "
        "https://ui.perfetto.dev; slows these steps",
    )


@with_sections_of_extras
class Config(Section):
    """The configuration of a job."""

    framework: str = Field(
        default="torch",
        description="framework that computes on each rank: torch, jax, keras (a keras.Model of "
        "yours, on the backend of KERAS_BACKEND), or "
        "numpy (the reference for linear models)",
    )
    run: str | None = Field(default=None, description="run folder; default: runs/DATA-MODEL-TIME")
    resume: str = Field(
        default="auto",
        description="auto: continue from the newest intact checkpoint of run= if there is one of "
        "this job; no: a new job; "
        "RUN: continue that run folder with its configuration, and with what the command changes "
        "in it",
    )
    epochs: float | None = Field(
        default=DEFAULT_EPOCHS,
        gt=0,
        le=10**9,
        description="passes over the training set, 0.5 or 2.25 too; no limit by default where "
        "stop.steps or stop.time ends the job",
    )
    seed: int = Field(
        default=1,
        ge=0,
        le=2**63 - 1,
        description="seed of shuffling, initial weights, augmentation and dropout",
    )
    hooks: list[str] = Field(
        default_factory=list,
        description="your own calls in the training loop, classes of hvdtrain.Hook: "
        "[package.module:Class]",
    )
    data: DataConfig = Field(default_factory=DataConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    recipe: RecipeConfig = Field(default_factory=RecipeConfig)
    norm: NormConfig = Field(default_factory=NormConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    shard: ShardConfig = Field(default_factory=ShardConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    @property
    def given_hooks(self) -> list[Any]:
        """Hooks that a script gives as objects."""
        return [] if self.given is None else list(self.given.make())

    @property
    def keeps_copies(self) -> bool:
        """Whether a job of several ranks keeps copies of its state, to go on without a rank that is
        lost, where its engine can."""
        can_divide = (
            self.framework == "torch" and self.shard.stage in (1, 2) and self.shard.group == "all"
        )
        return (
            self.guard.lost != "stop"
            and (not self.shard.stage or can_divide)
            and not self.parallel.cuts
        )

    @property
    def sections(self) -> list[Section]:
        """Every section, in the order of the keys."""
        return [getattr(self, name) for name in SECTIONS]

    def readers(self, ranks: int) -> int:
        """The number of ranks, of so many, that divide the samples of a step among them."""
        for section in self.sections:
            ranks = section.readers_of(ranks)
        return ranks

    def first_reader(self, ranks: int) -> int:
        """The first of so many ranks that reads samples of training."""
        return max(section.first_reader_of(ranks) for section in self.sections)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step is of one rank alone, and which one makes it is not known before."""
        return any(section.is_asynchronous for section in self.sections)

    @model_validator(mode="before")
    @classmethod
    def _default_epochs(cls, tree: Any) -> Any:
        """None where another limit ends the job."""
        if not isinstance(tree, dict) or tree.get("epochs") is not None:
            return tree
        stop = tree.get("stop") or {}
        others = [
            stop.get(key) if isinstance(stop, dict) else getattr(stop, key, None)
            for key in ("steps", "time")
        ]
        return tree | {"epochs": DEFAULT_EPOCHS if others == [None, None] else None}

    @field_validator("epochs")
    @classmethod
    def _as_people_write_it(cls, epochs: float | None) -> float | None:
        return None if epochs is None else as_given(epochs)

    def with_provenance(self, provenance: Mapping[str, str]) -> Config:
        """A copy which knows where these keys were set: {"batch.size": "configs/x.yaml:14"}; the
        others as here."""
        known = Provenance({**self._provenance, **provenance})
        copy = self.model_copy(update={name: getattr(self, name).model_copy() for name in SECTIONS})
        for section in (copy, *(getattr(copy, name) for name in SECTIONS)):
            section._provenance = known
        return copy


# The sections of Config, by key.
SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}


@functools.cache
def known_keys() -> dict[str, FieldInfo]:
    """Every key of the schema: {"epochs": ..., "batch.size": ...}."""
    keys = {name: info for name, info in Config.model_fields.items() if name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{name}": info for name, info in kind.model_fields.items()}
    return keys


def takes_text(key: str) -> bool:
    """Whether the value of a key is a text: 'no', '007' and '1e3' are then neither numbers nor
    truth values."""
    return key in known_keys() and known_keys()[key].annotation in (str, str | None)

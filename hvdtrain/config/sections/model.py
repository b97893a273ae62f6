"""The section model: the model, its loss, and which of its weights are pretrained, frozen or
adapted."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import OpenSection, Owners, Section
from hvdtrain.core.extras import plugins_of_extras
from hvdtrain.core.lengths import PositiveLength


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
    owners: ClassVar[Owners] = {
        f"model.{name}": ("model.lora", [])
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_train")
    }
    name: str = Field(
        default="wide_resnet",
        description="model: wide_resnet, convnet, "
        + "".join(f"{name}, " for name in plugins_of_extras("frameworks/torch/models"))
        + "alexnet, resnet18 ... resnet152, resnet8 ... resnet110, gpt, mlp, linear, timm:NAME, "
        "transformers:FOLDER, or your own as package.module:Class",
    )
    loss: Literal["cross_entropy", "squared_error"] = Field(
        default="cross_entropy",
        description="cross_entropy: cross-entropy of the softmax; squared_error: half the "
        "squared distance to the one-hot label",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="fraction of the label that is spread over all classes during training; "
        "the validation loss is computed without smoothing",
    )
    classifier_std: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="standard deviation of the initial weights of the last linear layer, "
        "whose bias is then 0 (Goyal 2017: 0.01); framework=torch only",
    )
    recompute: Literal["none", "all"] | Annotated[int, Field(ge=1, le=10**6)] = Field(
        default="none",
        description="activation checkpointing; all: no block of the model keeps activations, "
        "the backward pass recomputes them; N: every N-th block; none: all "
        "activations are kept",
    )
    weights: str | None = Field(
        default=None,
        description="pretrained weights to start a new job from: model.safetensors, model.pt, "
        "a run folder, or a folder that contains model.safetensors",
    )
    download: bool = Field(
        default=False,
        description="allow the model's code to download weights through torch.hub, as "
        "torchvision does, or from the Hugging Face Hub (framework=torch)",
    )
    freeze: list[str] = Field(
        default_factory=list,
        description="weights to freeze, and norms whose running statistics to freeze, by "
        "name, with * as a wildcard: ['backbone.*'] (framework=torch)",
    )
    thaw: list[ThawConfig] = Field(
        default_factory=list,
        description="frozen weights, and running statistics of their norms, to unfreeze "
        "later: [{at: 2, names: ['backbone.*']}]",
    )
    lora: list[str] = Field(
        default_factory=list,
        description="linear layers that get a low-rank adapter (LoRA), by name, with * as a "
        "wildcard: ['blocks.*.fc1']; all other weights are frozen, except those "
        "in model.lora_train and model.weights_skip (framework=torch)",
    )
    lora_train: list[str] = Field(
        default_factory=list,
        description="weights and running statistics to train in addition to the adapters of "
        "model.lora, by name, with * as a wildcard: ['head.*']; not those of the "
        "adapted layers",
    )
    lora_rank: int = Field(
        default=8, ge=1, le=10**6, description="rank of the adapters of model.lora"
    )
    lora_alpha: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="an adapter's output is scaled by lora_alpha / lora_rank; default: a "
        "factor of 1",
    )
    lora_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout probability of an adapter's input"
    )
    weights_skip: list[str] = Field(
        default_factory=list,
        description="weights not to load from model.weights, by name, with * as a wildcard: "
        "['fc.*']; they are initialized as in a new model",
    )
    weights_names: list[str] = Field(
        default_factory=list,
        description="OLD=NEW renames weights of the file whose names begin with OLD: "
        "['backbone.=']; with * it matches whole names: "
        "['encoder.layer.*.query.*=layers.*.q_proj.*']",
    )

    @property
    def lora_scale(self) -> float:
        """The factor of an adapter of model.lora."""
        return (self.lora_rank if self.lora_alpha is None else self.lora_alpha) / self.lora_rank

"""The section model: the model, its loss, and which of its weights are pretrained, frozen or
adapted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import OpenSection, Section
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

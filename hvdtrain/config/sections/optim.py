"""The section optim: the optimizer, and parameter groups with different rates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import OpenSection, Section


class GroupConfig(Section):
    """Parameters with a separate rate, decay or momentum: an entry of optim.groups."""

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
        description="optimizer: sgd, adam, adamw, lars, larc, lamb, novograd, muon, or the "
        "import path of a torch.optim.Optimizer, such as torch.optim.RMSprop (not "
        "LBFGS, whose step recomputes the loss)",
    )
    base_lr: float = Field(
        default=0.02,
        ge=0,
        le=1e6,
        description="learning rate after the warm-up for a global batch of optim.base_batch",
    )
    base_batch: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="global batch for which optim.base_lr is meant; default: batch.size, so "
        "that only a growing batch scales the learning rate",
    )
    momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="momentum, or the first beta of Adam-like optimizers; default: the "
        "optimizer's own, which is 0.9, or 0.95 for novograd and muon",
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="weight decay: weight_decay x weight is added to the gradient, or applied "
        "as the optimizer defines it; default: 0, or the default of the class if "
        "optim.name is an import path, which then decays all parameters",
    )
    exclude: Literal["norms_and_biases", "none"] = Field(
        default="norms_and_biases",
        description="norms_and_biases: parameters with at most one dimension get no weight "
        "decay and no scaling by lars, larc or lamb; none: all parameters do",
    )
    groups: list[GroupConfig] = Field(
        default_factory=list,
        description="parameters with their own momentum, or a factor of their learning rate or "
        "weight decay: a list of {names, rate, decay, momentum}, such as [{names: "
        "'*.bias', rate: 64}]; the first entry that matches a name applies",
    )
    ema: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay of an exponential moving average of the weights, such as 0.999, "
        "updated once per step; evaluations, predict, sample and export use the "
        "average instead of the weights (Polyak and Juditsky 1992)",
    )
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        le=1e30,
        description="largest Euclidean norm of the mean gradient over all parameters; a "
        "larger gradient is scaled down to it",
    )
    clip_value: float | None = Field(
        default=None,
        gt=0,
        le=1e30,
        description="clamp each element of the mean gradient to [-clip_value, clip_value], "
        "before optim.clip_norm",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_decay(cls, tree: Any) -> Any:
        """Returns the default decay; None if a user's class may have its own default."""
        if (
            not isinstance(tree, dict)
            or tree.get("weight_decay") is not None
            or {".", ":"} & set(str(tree.get("name", "")))
        ):
            return tree
        return tree | {"weight_decay": 0.0}

    @property
    def averages(self) -> bool:
        """Whether evaluations and exports use averages of the weights."""
        return self.ema is not None

    @property
    def decay(self) -> float:
        """The decay that hvdtrain passes to the optimizer: 0 if weight_decay is not set; then a
        user's class keeps its default."""
        return self.weight_decay or 0.0

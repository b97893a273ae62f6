"""The section recipe: how learning rate, batch and noise change over the job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section
from hvdtrain.core.lengths import LengthValue, PositiveLength

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
        description="how the learning rate depends on the global batch B; linear: base_lr x B "
        "/ base_batch; sqrt: base_lr x sqrt(B / base_batch); none: base_lr",
    )
    warmup: LengthValue = Field(
        default=0,
        description="length of the warm-up in epochs, or as '500 steps', '1e6 samples', '2e8 "
        "tokens' or '10%' of the job",
    )
    warmup_kind: Literal["gradual", "constant"] = Field(
        default="gradual",
        description="gradual: the learning rate rises linearly with each step from "
        "warmup_from; constant: it stays at warmup_from, then jumps",
    )
    warmup_from: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="learning rate at the start of the warm-up; default: base_lr if scaling "
        "increases it, otherwise 0",
    )
    schedule: Literal[Schedule, "one_cycle", "plateau"] = Field(
        default="constant",
        description="learning rate after the warm-up: constant; steps: multiplied by gamma at "
        "each milestone; exponential: multiplied by gamma in each epoch, spread "
        "evenly over its steps; cosine, linear, polynomial: decays to end_lr at "
        "the end of the job (epochs or stop.steps); one_cycle: rises from 1/25 of "
        "the rate over the first 30% of the job, then falls to 1/250,000, as in "
        "torch's OneCycleLR; plateau: "
        "multiplied by gamma when the task's objective stops improving, as in "
        "torch's ReduceLROnPlateau",
    )
    function: str | None = Field(
        default=None,
        description="your own schedule instead of recipe.schedule, as "
        "package.module:function; it maps the completed fraction of the job, 0 to "
        "1, to a factor of the learning rate",
    )
    cycle_momentum: list[float] = Field(
        default_factory=list,
        max_length=2,
        description="with schedule=one_cycle: the momentum falls to the first value while the "
        "learning rate rises, then rises to the second: [0.85, 0.95]",
    )
    milestones: list[LengthValue] = Field(
        default_factory=list,
        description="points at which schedule=steps multiplies the learning rate by gamma, "
        "counted from the start of the job in the units of recipe.warmup",
    )
    gamma: float = Field(
        default=0.1,
        ge=0,
        le=1e3,
        description="factor of the learning rate at each milestone of schedule=steps, in each "
        "epoch after the warm-up with schedule=exponential, and at each reduction "
        "by schedule=plateau",
    )
    power: float = Field(default=2.0, ge=0, le=100, description="exponent of schedule=polynomial")
    end_lr: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="final learning rate of schedule=cosine, linear and polynomial, and the "
        "lower bound of plateau",
    )
    patience: int = Field(
        default=10,
        ge=0,
        le=10**9,
        description="consecutive evaluations without improvement that schedule=plateau "
        "tolerates; the next one reduces the learning rate",
    )
    threshold: float = Field(
        default=1e-4,
        ge=0,
        le=1e30,
        description="a value must be better than the best one by more than this to count as an "
        "improvement with schedule=plateau",
    )
    threshold_mode: Literal["rel", "abs"] = Field(
        default="rel",
        description="rel: recipe.threshold is relative to the best value; abs: it is a difference",
    )
    cooldown: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="evaluations after a reduction by schedule=plateau that do not count "
        "towards recipe.patience",
    )
    floor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="fraction of the scaled learning rate below which no schedule falls after "
        "the warm-up; minGPT uses 0.1 with schedule=cosine",
    )
    chain: list[PieceConfig] = Field(
        default_factory=list,
        description="schedules that follow each other from the end of the warm-up, instead of "
        "recipe.schedule: a list of {kind, length, scale, milestones, gamma, "
        "power, end_lr}",
    )
    growth: Literal["none", "decays", "milestones"] = Field(
        default="none",
        description="none: the batch size stays constant; decays: where the schedule would "
        "divide the learning rate by a, the batch size is multiplied by a "
        "instead, up to batch_max; milestones: the batch size changes as set by "
        "grow_at and grow_to",
    )
    batch_max: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="largest global batch of growth=decays; once it is reached, the learning "
        "rate decays",
    )
    grow_at: list[LengthValue] = Field(
        default_factory=list,
        description="points at which growth=milestones changes the global batch, in the units "
        "of recipe.warmup",
    )
    grow_to: list[int] = Field(
        default_factory=list, description="global batch from each point of grow_at"
    )
    adapt_regime: bool = Field(
        default=False,
        description="train longer: multiply epochs and all epoch counts of the recipe by "
        "ceil(batch.size / base_batch)",
    )
    sample_noise: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="weight the loss of each sample by a random factor with mean 1 and "
        "variance sample_noise x (B / base_batch - 1); 1 gives the gradient noise "
        "of base_batch",
    )
    gradient_noise: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="eta: add Gaussian noise of variance eta / (1 + step)^0.55 to the mean "
        "gradient",
    )

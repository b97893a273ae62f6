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

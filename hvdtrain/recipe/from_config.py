"""Configuration -> Recipe: the learning rate schedule and the batch of every step."""

from __future__ import annotations

import itertools
import math

from hvdtrain.config.schema import Config, PieceConfig, RecipeConfig
from hvdtrain.errors import UserError
from hvdtrain.recipe.batch_growth import Growth, growth_instead_of_decays
from hvdtrain.recipe.conflicts import check_recipe, needs_time_after_warmup
from hvdtrain.recipe.recipe import Recipe, scaling
from hvdtrain.recipe.schedule import Chain, Constant, ConstantWarmup, Cosine, Exponential, Polynomial, Schedule, Steps, Warmup


def recipe_from_config(config: Config, dataset: int, momentum: float) -> Recipe:
    """The recipe of a job on `dataset` training samples; `momentum` is the optimizer's default where optim.momentum is left out.

    Raises UserError where keys of the recipe contradict each other, a batch exceeds the data set, the warm-up leaves no epoch to the
    schedule, or a rate is not finite.
    """
    check_recipe(config)
    growth = batch_growth(config)
    _check_batches_fit(growth, config, dataset)
    schedule = lr_schedule(config, dataset)
    _check_rates_are_finite(schedule, config)
    return Recipe(
        lr=schedule,
        batch=growth,
        momentum=momentum,
        weight_decay=config.optim.weight_decay,
        epochs=total_epochs(config),
        lr_follows_batch="linear" if config.recipe.growth == "decays" else config.recipe.scale,
        base_batch=base_batch(config),
        sample_noise=config.recipe.sample_noise,
        gradient_noise=config.recipe.gradient_noise,
    )


def base_batch(config: Config) -> int:
    """The global batch that optim.base_lr is meant for."""
    return config.optim.base_batch or config.batch.size


def epoch_multiplier(config: Config) -> int:
    """The factor on every count of epochs: with recipe.adapt_regime a job makes as many updates as it would with base_batch.

    Hoffer et al. 2017, arXiv:1705.08741, section 5: every count of epochs times ceil(B / 128), here times ceil(B / base_batch).
    """
    if not config.recipe.adapt_regime:
        return 1
    return -(-config.batch.size // base_batch(config))


def total_epochs(config: Config) -> int:
    """Epochs of the whole job."""
    return config.epochs * epoch_multiplier(config)


def peak_lr(config: Config) -> float:
    """The learning rate after the warm-up, for the first batch."""
    return config.optim.base_lr * scaling(config.recipe.scale, config.batch.size, base_batch(config))


def warmup_epochs(config: Config, dataset: int) -> float:
    """The length of the warm-up in epochs of the job; recipe.warmup_steps counts steps of the first batch."""
    if config.recipe.warmup == "none":
        return 0.0
    if config.recipe.warmup_steps:
        return config.recipe.warmup_steps * config.batch.size / dataset
    return config.recipe.warmup_epochs * epoch_multiplier(config)


def warmup_start_lr(config: Config) -> float:
    """The learning rate at the beginning of the warm-up."""
    if config.recipe.warmup_from is not None:
        return config.recipe.warmup_from
    return config.optim.base_lr if peak_lr(config) > config.optim.base_lr else 0.0


def lr_schedule(config: Config, dataset: int) -> Schedule:
    """The learning rate for the first batch, over the whole job.

    Raises UserError where the warm-up leaves no epoch to the schedule.
    """
    recipe, warmup, end = config.recipe, warmup_epochs(config, dataset), total_epochs(config)
    if warmup >= end and needs_time_after_warmup(recipe):  # of recipe.warmup_steps, whose length in epochs depends on the data
        what = f"a warm-up of {warmup:g} epochs leaves nothing of {end} epochs to the schedule"
        raise UserError(what, config.where("recipe.warmup_epochs"), "a shorter warm-up, or more epochs")
    after_warmup = _schedule_after_warmup(config, warmup)
    if not warmup:
        return after_warmup
    if recipe.warmup == "constant":
        return ConstantWarmup(warmup, warmup_start_lr(config), after_warmup)
    return Warmup(warmup, warmup_start_lr(config), after_warmup)


def schedule_pieces(recipe: RecipeConfig) -> list[PieceConfig]:
    """recipe.chain, or recipe.schedule as a chain of one piece."""
    return list(recipe.chain) or [
        PieceConfig(
            kind=recipe.schedule,
            epochs=None,
            scale=1.0,
            milestones=recipe.milestones,
            gamma=recipe.gamma,
            power=recipe.power,
            end_lr=recipe.end_lr,
        )
    ]


def batch_growth(config: Config) -> Growth:
    """The global batch over the whole job."""
    recipe, multiplier, first = config.recipe, epoch_multiplier(config), config.batch.size
    if recipe.growth == "decays":
        assert recipe.batch_max is not None  # check_recipe()
        milestones = tuple(epoch * multiplier for epoch in recipe.milestones)
        return growth_instead_of_decays(first, milestones, recipe.gamma, recipe.batch_max)
    return Growth(first, tuple(epoch * multiplier for epoch in recipe.grow_at), tuple(recipe.grow_to))


def _check_batches_fit(growth: Growth, config: Config, dataset: int) -> None:
    """A step is at most one pass over the data."""
    later_key = "recipe.batch_max" if config.recipe.growth == "decays" else "recipe.grow_to"
    for batch in (growth.first, *growth.to):
        if batch > dataset:
            key = "batch.size" if batch == growth.first else later_key
            raise UserError(f"batch {batch} is more than the {dataset} training samples", config.where(key), f"{dataset} or less")


def _check_rates_are_finite(schedule: Schedule, config: Config) -> None:
    end = float(total_epochs(config))
    try:
        finite = all(math.isfinite(schedule(epoch)) for epoch in (0.0, end / 2, end))
    except OverflowError:
        finite = False
    if not finite:
        what = "the learning rate grows beyond the largest float"
        raise UserError(what, config.where("recipe.gamma"), "a smaller gamma, or fewer epochs")


def _schedule_after_warmup(config: Config, warmup: float) -> Schedule:
    """The pieces one after the other, counted from the beginning of the job; those that decay begin after the warm-up."""
    pieces, multiplier = schedule_pieces(config.recipe), epoch_multiplier(config)
    job_end, last = float(total_epochs(config)), pieces[-1]
    starts = [0.0, *itertools.accumulate(float((piece.epochs or 0.0) * multiplier) for piece in pieces[:-1])]
    ends = [*starts[1:], starts[-1] + last.epochs * multiplier if last.epochs else job_end]
    schedules = []
    for piece, start, end in zip(pieces, starts, ends, strict=True):
        schedules.append(_piece_schedule(piece, peak_lr(config), start, max(start, warmup), end, multiplier))
    return schedules[0] if len(schedules) == 1 else Chain(tuple(starts), tuple(schedules))


def _piece_schedule(piece: PieceConfig, peak: float, start: float, decay_start: float, end: float, multiplier: int) -> Schedule:
    """One piece from epoch `start` to `end`; a decay begins at `decay_start`, after the warm-up."""
    value = peak * piece.scale
    decay_end = max(end, decay_start + 1e-9)  # a piece that ends within the warm-up is not called; its length must not be 0
    match piece.kind:
        case "steps":
            return Steps(value, tuple(start + milestone * multiplier for milestone in piece.milestones), piece.gamma)
        case "cosine":
            return Cosine(value, piece.end_lr, decay_start, decay_end)
        case "polynomial":
            return Polynomial(value, piece.end_lr, decay_start, decay_end, piece.power)
        case "exponential":
            return Exponential(value, piece.gamma, decay_start, float(multiplier))
    return Constant(value)

"""Builds the Recipe from the configuration: the learning rate schedule and the batch of every
step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.config.plugins import load_dotted, of_python
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.recipe import PieceConfig, RecipeConfig
from hvdtrain.core.lengths import Length, read_length
from hvdtrain.errors import UserError, short
from hvdtrain.recipe.batch import Growth, batches_instead_of_decays, steps_before
from hvdtrain.recipe.clock import Clock, base_batch, clock
from hvdtrain.recipe.conflicts import SHORTER_WARMUP, check_recipe, needs_time_after_warmup
from hvdtrain.recipe.plateau import PlateauRule
from hvdtrain.recipe.recipe import Recipe, scaling
from hvdtrain.recipe.schedules import (
    AtLeast,
    Chain,
    Constant,
    ConstantWarmup,
    Cosine,
    Exponential,
    OneCycle,
    Polynomial,
    Schedule,
    Steps,
    UsersSchedule,
    Warmup,
)


def recipe_from_config(
    config: Config, dataset: int, momentum: float, context: int | None = None
) -> Recipe:
    """Builds the recipe of a job on `dataset` training samples. momentum: the optimizer's default,
    used if optim.momentum is not set.

    context: tokens of a sample, None if samples have no tokens. Raises UserError if keys contradict
    each other, if a batch exceeds the data set, or if a rate is not finite. Also raises it if the
    warm-up takes the whole job, or if a length counts tokens but samples have no tokens.
    """
    check_recipe(config)
    time = clock(config, dataset, context)
    growth = batch_growth(config, time)
    _check_batches_fit(growth, config, dataset)
    schedule = lr_schedule(config, time, growth)
    end = time.end(growth)
    _check_rates_are_finite(schedule, config, end)
    return Recipe(
        lr=schedule,
        batch=growth,
        momentum=momentum,
        weight_decay=config.optim.decay,
        epochs=end,
        lr_follows_batch="linear" if config.recipe.growth == "decays" else config.recipe.scale,
        base_batch=base_batch(config),
        sample_noise=config.recipe.sample_noise,
        gradient_noise=config.recipe.gradient_noise,
        local_from=time.after(
            0.0, read_length(config.comm.local_from), growth, config.where("comm.local_from")
        ),
        plateau=_plateau(config, warmup_epochs(config, time, growth)),
        momentum_cycle=_momentum_cycle(config, end),
        thaw=tuple(_steps_until(entry.at, config, time, growth) for entry in config.model.thaw),
    )


def _plateau(config: Config, warmup: float) -> PlateauRule | None:
    recipe = config.recipe
    peak = peak_lr(config)
    if recipe.schedule != "plateau":
        return None
    return PlateauRule(
        peak=peak,
        begin=warmup,
        gamma=recipe.gamma,
        patience=recipe.patience,
        threshold=recipe.threshold,
        is_relative=recipe.threshold_mode == "rel",
        cooldown=recipe.cooldown,
        least=max(recipe.floor, recipe.end_lr / peak if peak else 0.0),
    )


# share of the job, as pct_start of torch's OneCycleLR; below its div_factor and final_div_factor
_RISE = 0.3
# shares of the rate
_START = 1 / 25
_END = 1 / 25 / 1e4


def _momentum_cycle(config: Config, end: float) -> OneCycle | None:
    """Returns the momentum of recipe.schedule=one_cycle, which is low when the rate is high."""
    if not config.recipe.cycle_momentum:
        return None
    low, high = config.recipe.cycle_momentum
    return OneCycle(high, low, high, _RISE * end, end)


def _one_piece(config: Config, end: float) -> Schedule | None:
    """Returns a schedule over the whole job, without pieces: the user's, or one_cycle; else
    None."""
    peak = peak_lr(config)
    function = users_function(config)
    if function is not None:
        return UsersSchedule(peak, function, end, config.where("recipe.function"))
    if config.recipe.schedule == "one_cycle":
        return OneCycle(peak * _START, peak, peak * _END, _RISE * end, end)
    return None


def _steps_until(length: float | str, config: Config, time: Clock, growth: Growth) -> int:
    """Returns the number of steps before the end of a length of model.thaw."""
    epochs = time.after(0.0, read_length(length), growth, config.where("model.thaw"))
    return math.ceil(steps_before(epochs, growth, time.dataset))


def users_function(config: Config) -> Callable[[float], float] | None:
    """Returns the schedule that a script passes, or that recipe.function names. Raises UserError if
    the name does not exist."""
    recipe = config.recipe
    if recipe.given is not None:
        function: Callable[[float], float] = recipe.given.make()
        return function
    if recipe.function is None:
        return None
    if of_python(recipe.function):
        raise UserError(
            f"{short(recipe.function)} is part of Python itself, not a schedule",
            config.where("recipe.function"),
            "a function of your own",
        )
    return load_dotted(recipe.function, config.where("recipe.function"))


def peak_lr(config: Config) -> float:
    """Returns the learning rate after the warm-up, for the first batch size."""
    return config.optim.base_lr * scaling(
        config.recipe.scale, config.batch.size, base_batch(config)
    )


def warmup_epochs(config: Config, time: Clock, growth: Growth) -> float:
    """Epochs done at the end of the warm-up.

    minGPT counts a step's tokens before it computes the step's rate, so its rates are one step
    ahead.
    """
    return time.after(0.0, read_length(config.recipe.warmup), growth, config.where("recipe.warmup"))


def warmup_start_lr(config: Config) -> float:
    """Returns the learning rate at the beginning of the warm-up."""
    if config.recipe.warmup_from is not None:
        return config.recipe.warmup_from
    return config.optim.base_lr if peak_lr(config) > config.optim.base_lr else 0.0


def lr_schedule(config: Config, time: Clock, growth: Growth) -> Schedule:
    """Returns the learning rate over the whole job, for the first batch size.

    Raises UserError if the warm-up takes the whole job.
    """
    recipe = config.recipe
    warmup = warmup_epochs(config, time, growth)
    end = time.end(growth)
    if warmup >= end and needs_time_after_warmup(recipe):
        length = _with_epochs(read_length(recipe.warmup), warmup)
        what = (
            f"a warm-up of {length} leaves nothing of {end:g} epoch{'s' if end != 1 else ''} for "
            "the schedule"
        )
        raise UserError(what, config.where("recipe.warmup"), f"{SHORTER_WARMUP}; or a longer job")
    after_warmup = _one_piece(config, end) or _schedule_after_warmup(config, time, growth, warmup)
    if recipe.floor:
        after_warmup = AtLeast(recipe.floor * peak_lr(config), after_warmup)
    if not warmup:
        return after_warmup
    if recipe.warmup_kind == "constant":
        return ConstantWarmup(warmup, warmup_start_lr(config), after_warmup)
    return Warmup(warmup, warmup_start_lr(config), after_warmup)


def schedule_pieces(recipe: RecipeConfig) -> list[PieceConfig]:
    """Returns recipe.chain, or recipe.schedule as a chain of one piece."""
    kind: Any = "constant" if recipe.schedule in ("plateau", "one_cycle") else recipe.schedule
    return list(recipe.chain) or [
        PieceConfig(
            kind=kind,
            length=None,
            scale=1.0,
            milestones=recipe.milestones,
            gamma=recipe.gamma,
            power=recipe.power,
            end_lr=recipe.end_lr,
        )
    ]


def batch_growth(config: Config, time: Clock) -> Growth:
    """Returns the global batch over the whole job. Raises UserError if changes are not in ascending
    order."""
    recipe = config.recipe
    first = config.batch.size
    if recipe.growth == "decays":
        assert recipe.batch_max is not None  # check_recipe()
        key = "recipe.milestones"
        lengths = recipe.milestones
        to = batches_instead_of_decays(first, len(lengths), recipe.gamma, recipe.batch_max)
    else:
        key = "recipe.grow_at"
        lengths = recipe.grow_at
        to = tuple(recipe.grow_to)
    growth = Growth(first)
    for length in lengths:  # steps are counted with the batches before the change
        at = (*growth.at, time.after(0.0, read_length(length), growth, config.where(key)))
        _check_rising(key, lengths, at, config.where(key))
        growth = Growth(first, at, to[: len(at)])
    return growth


def _check_rising(
    key: str, lengths: Sequence[float | str], at: Sequence[float], where: str
) -> None:
    """Raises UserError if lengths, which end after `at` epochs, are not ascending."""
    for earlier, later, length, other in zip(at, at[1:], lengths, lengths[1:], strict=False):
        if not earlier < later:
            what = (
                f"{key}: {_with_epochs(read_length(other), later)} come after "
                f"{_with_epochs(read_length(length), earlier)}"
            )
            raise UserError(what, where, "lengths in ascending order")


def _with_epochs(length: Length, epochs: float) -> str:
    """Formats a length with its epochs: 500 steps (0.35 epochs)."""
    return (
        length.words()
        if length.unit == "epochs"
        else f"{length.words()} ({epochs:g} epoch{'s' if epochs != 1 else ''})"
    )


def _check_batches_fit(growth: Growth, config: Config, dataset: int) -> None:
    """Raises UserError if a batch is larger than the data set."""
    later_key = "recipe.batch_max" if config.recipe.growth == "decays" else "recipe.grow_to"
    for batch in (growth.first, *growth.to):
        if batch > dataset:
            key = "batch.size" if batch == growth.first else later_key
            raise UserError(
                f"batch {batch} is more than the {dataset} training samples",
                config.where(key),
                f"{dataset} or less",
            )


def _check_rates_are_finite(schedule: Schedule, config: Config, end: float) -> None:
    try:
        finite = all(
            math.isfinite(schedule(epoch)) for epoch in (0.0, end / 2, end) if epoch < math.inf
        )
    except OverflowError:
        finite = False
    if not finite:
        what = "the learning rate grows beyond the largest float"
        raise UserError(what, config.where("recipe.gamma"), "a smaller gamma, or fewer epochs")


def _schedule_after_warmup(config: Config, time: Clock, growth: Growth, warmup: float) -> Schedule:
    """Returns the pieces of recipe.chain one after the other, or the piece of recipe.schedule. The
    first begins at the end of the warm-up.

    Milestones of recipe.schedule=steps count from the beginning of the job, but a decay begins
    after the warm-up.

    Raises UserError if the last piece begins at the end of the job or later.
    """
    pieces = schedule_pieces(config.recipe)
    end = time.end(growth)
    key = "recipe.chain" if config.recipe.chain else "recipe.milestones"
    where = config.where(key)
    starts = [warmup if config.recipe.chain else 0.0]
    for piece in pieces:
        starts.append(
            end
            if piece.length is None
            else time.after(starts[-1], read_length(piece.length), growth, where)
        )
    if starts[-2] >= end:
        what = f"recipe.chain's last piece begins at epoch {starts[-2]:g} of {end:g}"
        raise UserError(what, where, "shorter pieces, or a longer job")
    schedules: list[Schedule] = []
    for piece, start, stop in zip(pieces, starts, starts[1:], strict=False):
        milestones = tuple(
            time.after(start, read_length(each), growth, where) for each in piece.milestones
        )
        _check_rising(key, piece.milestones, milestones, where)
        schedules.append(
            _piece_schedule(
                piece, peak_lr(config), milestones, max(start, warmup), stop, time.multiplier
            )
        )
    return schedules[0] if len(schedules) == 1 else Chain(tuple(starts[:-1]), tuple(schedules))


def _piece_schedule(
    piece: PieceConfig,
    peak: float,
    milestones: tuple[float, ...],
    decay_start: float,
    end: float,
    multiplier: int,
) -> Schedule:
    """Returns the schedule of one piece up to epoch `end`; a decay begins at `decay_start`, after
    the warm-up."""
    value = peak * piece.scale
    # a piece of 1e-300 epochs, for example if the job ends within the warm-up, would have no length
    decay_end = max(end, decay_start + 1e-9)
    match piece.kind:
        case "steps":
            return Steps(value, milestones, piece.gamma)
        case "cosine":
            return Cosine(value, piece.end_lr, decay_start, decay_end)
        case "linear":
            return Polynomial(value, piece.end_lr, decay_start, decay_end, 1.0)
        case "polynomial":
            return Polynomial(value, piece.end_lr, decay_start, decay_end, piece.power)
        case "exponential":
            return Exponential(value, piece.gamma, decay_start, float(multiplier))
    return Constant(value)

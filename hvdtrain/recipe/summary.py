"""Describes the recipe in header lines: the arithmetic of the learning rate, and the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hvdtrain.config.schema import Config
from hvdtrain.config.sections.recipe import PieceConfig
from hvdtrain.config.sections.section import class_of_object
from hvdtrain.core.lengths import read_length
from hvdtrain.recipe.batch import steps_before
from hvdtrain.recipe.clock import base_batch, clock, epoch_multiplier
from hvdtrain.recipe.from_config import batch_growth, peak_lr, schedule_pieces, warmup_start_lr
from hvdtrain.recipe.recipe import Recipe, scaling

MOST_EPOCHS = 64  # epochs whose steps averages_lines() counts


def lr_summary(config: Config, dataset: int, context: int | None = None) -> str:
    """Describes the rate: lr 0.1 x 8192/256 = 3.2 after 5 warm-up epochs (linear scaling, from
    0.1), then x 0.1 at epochs 30, 60, 80."""
    multiplier = epoch_multiplier(config)
    line = _peak_and_warmup(config, multiplier)
    for piece in schedule_pieces(config.recipe):
        summary = _piece_summary(piece, multiplier)
        if summary:
            line += f", then {summary}"
    if config.recipe.function is not None:
        line += f" x {class_of_object(config.recipe.function)}(share of the job)"
    if config.recipe.schedule == "one_cycle":
        line += (
            f", one cycle from {peak_lr(config) / 25:g} up over 30% of the job, down to "
            f"{peak_lr(config) / 25e4:.3g}"
        )
    if config.recipe.cycle_momentum:
        line += ", momentum {1:g} to {0:g} and back".format(*config.recipe.cycle_momentum)
    if config.recipe.schedule == "plateau":
        patience = config.recipe.patience
        evaluations = f"{patience} evaluation{'s' if patience != 1 else ''} in a row"
        line += (
            f", then x {config.recipe.gamma:g} after more than {evaluations} without a better one"
        )
        line += f", down to {config.recipe.end_lr:g}" if config.recipe.end_lr else ""
    if config.recipe.floor:
        line += f", never below {config.recipe.floor * peak_lr(config):g}"
    if config.recipe.growth == "decays":
        line += f", replaced by batch growth up to {config.recipe.batch_max}"
    if config.recipe.growth == "milestones" and config.recipe.scale != "none":
        line += (
            f"; follows the batch ({config.recipe.scale}): "
            f"{_rates_of_grown_batches(config, dataset, context)}"
        )
    if multiplier > 1:
        line += f"; regime adapted: {multiplier} times the epochs"
    return line


def noise_summary(config: Config) -> str:
    """Describes the noise: gradient noise of variance 0.01 / (1 + step)^0.55; losses of samples
    weighted with variance 2. Empty if there is none."""
    recipe = config.recipe
    parts = []
    if recipe.gradient_noise:
        parts.append(f"gradient noise of variance {recipe.gradient_noise:g} / (1 + step)^0.55")
    if recipe.sample_noise:
        variance = recipe.sample_noise * max(0.0, config.batch.size / base_batch(config) - 1)
        at_first = " at first" if recipe.growth != "none" else ""
        parts.append(f"losses of samples weighted with variance {variance:g}{at_first}")
    return "; ".join(parts)


def batch_summary(recipe: Recipe) -> str:
    """Describes the batch: 128, 640 from epoch 60, 3200 from epoch 120."""
    changes = [
        f"{batch} from epoch {epoch:g}"
        for epoch, batch in zip(recipe.batch.at, recipe.batch.to, strict=True)
    ]
    return ", ".join([str(recipe.batch.first), *changes])


def averages_lines(local_steps: int, recipe: Recipe, dataset: int) -> list[str]:
    """Describes when ranks average weights: after each 3 local steps, and at the end of each epoch,
    of 22 or 23 steps, where the count restarts.

    Returns no line if comm.local_steps divides every epoch from comm.local_from on, because then
    ranks average at the end of an epoch anyway.
    """
    first = math.floor(recipe.local_from) + 1
    last = math.floor(min(recipe.epochs, first + MOST_EPOCHS))
    ends = [
        steps_before(epoch, recipe.batch, dataset)
        for epoch in (recipe.local_from, *range(first, last + 1))
    ]
    lengths = [int(later - earlier) for earlier, later in itertools.pairwise(ends)]
    if not any(length % local_steps for length in lengths):
        return []
    least = min(lengths)
    most = max(lengths)
    steps = (
        f"{most} step{'s' if most > 1 else ''}"
        if least == most
        else f"{least} {'or' if most == least + 1 else 'to'} {most} steps"
    )
    after = f"after each {local_steps} local steps, and at the end of each epoch, of {steps}"
    return [f"averages of the weights {after}: the count begins again there"]


def _peak_and_warmup(config: Config, multiplier: int) -> str:
    """Returns for example "lr 0.1 x 8192/256 = 3.2 after 5 warm-up epochs (linear scaling, from
    0.1)"."""
    recipe = config.recipe
    base_lr = config.optim.base_lr
    peak = peak_lr(config)
    line = f"lr {base_lr:g}"
    notes = []
    if peak != base_lr:
        ratio = f"{config.batch.size}/{base_batch(config)}"
        line += f" x {ratio if recipe.scale == 'linear' else f'sqrt({ratio})'} = {peak:g}"
        notes.append(f"{recipe.scale} scaling")
    length = read_length(recipe.warmup)
    if length.amount:
        words = length.words(multiplier)
        amount, _, unit = words.rpartition(" ")
        line += (
            f" after a warm-up of {words}"
            if length.unit == "%"
            else f" after {amount} warm-up {unit}"
        )
        notes.append(
            f"{'all at' if recipe.warmup_kind == 'constant' else 'from'} "
            f"{warmup_start_lr(config):g}"
        )
    return f"{line} ({', '.join(notes)})" if notes else line


def _rates_of_grown_batches(config: Config, dataset: int, context: int | None) -> str:
    """Describes the rates of grown batches: 0.16 from epoch 2, 0.04 from epoch 3.5."""
    growth = batch_growth(config, clock(config, dataset, context))
    peak = peak_lr(config)
    rates = []
    for epoch, batch in zip(growth.at, growth.to, strict=True):
        rates.append(
            f"{peak * scaling(config.recipe.scale, batch, growth.first):g} from epoch {epoch:g}"
        )
    return ", ".join(rates)


def _piece_summary(piece: PieceConfig, multiplier: int) -> str:
    """Describes a piece: x 0.1 at epochs 30, 60, 80. Empty for a constant piece at the peak rate up
    to the end."""
    length = f" for {read_length(piece.length).words(multiplier)}" if piece.length else ""
    scale = f" from x {piece.scale:g}" if piece.scale != 1 else ""
    match piece.kind:
        case "steps":
            return (
                f"x {piece.gamma:g} at {_milestones(piece.milestones, multiplier)}{scale}{length}"
            )
        case "linear":
            return f"linear to {piece.end_lr:g}{scale}{length}"
        case "cosine":
            return f"cosine to {piece.end_lr:g}{scale}{length}"
        case "polynomial":
            return f"polynomial of power {piece.power:g} to {piece.end_lr:g}{scale}{length}"
        case "exponential":
            period = f"{multiplier} epochs" if multiplier > 1 else "epoch"
            return f"x {piece.gamma:g} in each {period}{scale}{length}"
    return f"constant{scale}{length}" if scale or length else ""


def _milestones(lengths: Sequence[float | str], multiplier: int) -> str:
    """Formats milestones: epochs 30, 60, 80; or 500 steps, 50% of the job."""
    read = [read_length(length) for length in lengths]
    if all(length.unit == "epochs" for length in read):
        return f"epochs {', '.join(f'{length.amount * multiplier:g}' for length in read)}"
    return ", ".join(length.words(multiplier) for length in read)

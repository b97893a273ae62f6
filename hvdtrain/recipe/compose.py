"""The configuration's words -> Recipe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.config.read import COMMAND_LINE, Provenance
from hvdtrain.config.schema import Config, PieceConfig
from hvdtrain.errors import UserError
from hvdtrain.recipe.batch_growth import Growth, from_decays
from hvdtrain.recipe.conflicts import check
from hvdtrain.recipe.recipe import Recipe, scaling
from hvdtrain.recipe.schedule import Chain, Constant, ConstantWarmup, Cosine, Exponential, Polynomial, Schedule, Steps, Warmup


def compose(config: Config, provenance: Provenance, dataset: int, momentum: float) -> Recipe:
    """The recipe of a job on `dataset` training samples; `momentum` is the optimizer's own where the user names none."""
    check(config, provenance)
    base_batch = config.optim.base_batch or config.batch.size
    batch, lr = batches(config, provenance, dataset), rates(config, provenance, dataset)
    _check_range(lr, float(epochs(config)), provenance)
    return Recipe(
        lr=lr,
        batch=batch,
        momentum=momentum,
        weight_decay=config.optim.weight_decay,
        epochs=epochs(config),
        follow="linear" if config.recipe.growth == "decays" else config.recipe.scale,
        base_batch=base_batch,
        sample_noise=config.recipe.sample_noise,
        gradient_noise=config.recipe.gradient_noise,
    )


def for_ranks(config: Config, provenance: Provenance, ranks: int) -> tuple[Config, Provenance]:
    """With batch.per_rank turned into batch.size, where it counts: a run folder keeps the latter, so a resumed job keeps its batch.

    The command line counts more than a file, and what a run was made with more than a file that is given with resume.
    """
    if config.batch.per_rank is None:
        return config, provenance
    told = [key for key in ("batch.size", "batch.per_rank") if provenance.get(key) == COMMAND_LINE]
    size_first = told == ["batch.size"] or (not told and "batch.size" in provenance and config.resume != "no")
    if len(told) == 2 or (not told and "batch.size" in provenance and not size_first):
        raise UserError("batch.size and batch.per_rank are both given", provenance.where("batch.per_rank"), "keep one of them")
    size = config.batch.size if size_first else config.batch.per_rank * ranks
    if not size_first:
        provenance = Provenance(provenance | {"batch.size": f"{provenance.where('batch.per_rank')} x {ranks} ranks"})
    return replace(config, batch=replace(config.batch, size=size, per_rank=None)), provenance


def stretch(config: Config) -> int:
    """How many times longer than written the job is: regime adaptation keeps the number of updates that base_batch would make.

    Hoffer et al. 2017, arXiv:1705.08741, section 5: every count of epochs times ceil(B / 128), here times ceil(B / base_batch).
    """
    return -(-config.batch.size // (config.optim.base_batch or config.batch.size)) if config.recipe.adapt_regime else 1


def epochs(config: Config) -> int:
    """Epochs of the whole job."""
    return config.epochs * stretch(config)


def peak(config: Config) -> float:
    """The rate after the warm-up, for the first batch."""
    return config.optim.base_lr * scaling(config.recipe.scale, config.batch.size, config.optim.base_batch or config.batch.size)


def warmup_epochs(config: Config, dataset: int) -> float:
    """The length of the warm-up in epochs of the job; steps are counted with the first batch."""
    if config.recipe.warmup == "none":
        return 0.0
    if config.recipe.warmup_steps:
        return config.recipe.warmup_steps * config.batch.size / dataset
    return config.recipe.warmup_epochs * stretch(config)


def warmup_from(config: Config) -> float:
    """The rate at the beginning of the warm-up."""
    if config.recipe.warmup_from is not None:
        return config.recipe.warmup_from
    return config.optim.base_lr if peak(config) > config.optim.base_lr else 0.0


def rates(config: Config, provenance: Provenance, dataset: int) -> Schedule:
    """The learning rate for the first batch, over the whole job."""
    warm = warmup_epochs(config, dataset)
    if warm >= epochs(config) and (config.recipe.schedule in ("cosine", "polynomial") or config.recipe.chain):
        what = f"a warm-up of {warm:g} epochs leaves nothing of {epochs(config)} epochs to the schedule"
        raise UserError(what, provenance.where("recipe.warmup_epochs"), "a shorter warm-up, or more epochs")
    r = config.recipe
    whole = PieceConfig(r.schedule, None, 1.0, r.milestones, r.gamma, r.power, r.end_lr)
    then = _chain(config, provenance, r.chain or [whole], warm)
    if not warm:
        return then
    return (ConstantWarmup if r.warmup == "constant" else Warmup)(warm, warmup_from(config), then)


def batches(config: Config, provenance: Provenance, dataset: int) -> Growth:
    """The global batch over the whole job; no step is more than one pass over the data."""
    growth = grown(config)
    for batch in (growth.first, *growth.to):
        if batch > dataset:
            key = "batch.size" if batch == growth.first else "recipe.batch_max" if config.recipe.growth == "decays" else "recipe.grow_to"
            raise UserError(f"batch {batch} is more than the {dataset} training samples", provenance.where(key), f"{dataset} or less")
    return growth


def grown(config: Config) -> Growth:
    """The global batch over the whole job, whatever the data."""
    r, k, first = config.recipe, stretch(config), config.batch.size
    if r.growth == "decays":
        assert r.batch_max is not None  # check()
        return from_decays(first, tuple(m * k for m in r.milestones), r.gamma, r.batch_max)
    return Growth(first, tuple(e * k for e in r.grow_at), tuple(r.grow_to))


def _check_range(lr: Schedule, end: float, provenance: Provenance) -> None:
    """A rate that no float can hold is told before the first step."""
    try:
        fits = all(math.isfinite(lr(epoch)) for epoch in (0.0, end / 2, end))
    except OverflowError:
        fits = False
    if not fits:
        raise UserError("the rate grows beyond every number", provenance.where("recipe.gamma"), "a smaller gamma, or fewer epochs")


def _chain(config: Config, provenance: Provenance, pieces: Sequence[PieceConfig], warm: float) -> Schedule:
    k, end = stretch(config), float(epochs(config))
    starts = [0.0, *itertools.accumulate(float((piece.epochs or 0.0) * k) for piece in pieces[:-1])]
    if starts[-1] >= end:
        what = f"the chain's last piece begins at epoch {starts[-1]:g} of {end:g}"
        raise UserError(what, provenance.where("recipe.chain"), "shorter pieces, or more epochs")
    bounds = [*starts[1:], starts[-1] + pieces[-1].epochs * k if pieces[-1].epochs else end]
    made = tuple(_piece(piece, peak(config), (a, max(a, warm), b), k) for piece, a, b in zip(pieces, starts, bounds, strict=True))
    return made[0] if len(made) == 1 else Chain(tuple(starts), made)


def _piece(piece: PieceConfig, top: float, when: tuple[float, float, float], k: int) -> Schedule:
    """One piece; `when` is the epoch at which it begins, the one from which no warm-up covers it, and the one at which it ends."""
    start, begin, finish = when
    value = top * piece.scale
    finish = max(finish, begin + 1e-9)  # a piece that lies whole inside the warm-up is never asked
    match piece.kind:
        case "steps":
            return Steps(value, tuple(start + m * k for m in piece.milestones), piece.gamma)
        case "cosine":
            return Cosine(value, piece.end_lr, begin, finish)
        case "polynomial":
            return Polynomial(value, piece.end_lr, begin, finish, piece.power)
        case "exponential":
            return Exponential(value, piece.gamma, begin, float(k))
    return Constant(value)

"""The configuration's words -> Recipe; a wish that contradicts itself is a UserError."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.config import Config, PieceConfig
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError
from hvdtrain.recipe import growth
from hvdtrain.recipe.growth import Growth
from hvdtrain.recipe.recipe import Recipe, scaling
from hvdtrain.recipe.schedule import Chain, Constant, ConstantWarmup, Cosine, Exponential, Polynomial, Schedule, Steps, Warmup


def compose(config: Config, origins: Origins, dataset: int, momentum: float) -> Recipe:
    """The recipe of a job on `dataset` training samples; `momentum` is the optimizer's own where the user names none."""
    check(config, origins)
    base_batch = config.optim.base_batch or config.batch.size
    batch = batches(config, origins, dataset)
    return Recipe(
        lr=rates(config, origins, dataset),
        batch=batch,
        momentum=momentum,
        weight_decay=config.optim.weight_decay,
        epochs=epochs(config),
        follow="linear" if config.recipe.growth == "decays" else config.recipe.scale,
        base_batch=base_batch,
        sample_noise=config.recipe.sample_noise,
        gradient_noise=config.recipe.gradient_noise,
    )


def for_ranks(config: Config, ranks: int) -> Config:
    """The configuration with batch.per_rank turned into batch.size; a run folder keeps the latter, so a resumed job keeps its batch."""
    if config.batch.per_rank is None:
        return config
    return replace(config, batch=replace(config.batch, size=config.batch.per_rank * ranks, per_rank=None))


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


def rates(config: Config, origins: Origins, dataset: int) -> Schedule:
    """The learning rate for the first batch, over the whole job."""
    warm = warmup_epochs(config, dataset)
    if warm >= epochs(config) and (config.recipe.schedule in ("cosine", "polynomial") or config.recipe.chain):
        what = f"a warm-up of {warm:g} epochs leaves nothing of {epochs(config)} epochs to the schedule"
        raise UserError(what, origins.where("recipe.warmup_epochs"), "a shorter warm-up, or more epochs")
    r = config.recipe
    whole = PieceConfig(r.schedule, None, 1.0, r.milestones, r.gamma, r.power, r.end_lr)
    then = _chain(config, origins, r.chain or [whole], warm)
    if not warm:
        return then
    return (ConstantWarmup if r.warmup == "constant" else Warmup)(warm, warmup_from(config), then)


def batches(config: Config, origins: Origins, dataset: int) -> Growth:
    """The global batch over the whole job; no step is more than one pass over the data."""
    r, k = config.recipe, stretch(config)
    first = config.batch.size
    if r.growth == "decays":
        assert r.batch_max is not None  # check()
        grown = growth.from_decays(first, tuple(m * k for m in r.milestones), r.gamma, r.batch_max)
        key = "recipe.batch_max"
    else:
        grown = Growth(first, tuple(e * k for e in r.grow_at), tuple(r.grow_to))
        key = "recipe.grow_to"
    for batch in (first, *grown.to):
        if batch > dataset:
            where = origins.where("batch.size" if batch == first else key)
            raise UserError(f"batch {batch} is more than the {dataset} training samples", where, f"{dataset} or less")
    return grown


def _chain(config: Config, origins: Origins, pieces: Sequence[PieceConfig], warm: float) -> Schedule:
    k, end = stretch(config), float(epochs(config))
    starts = [0.0, *itertools.accumulate(float((piece.epochs or 0.0) * k) for piece in pieces[:-1])]
    if starts[-1] >= end:
        what = f"the chain's last piece begins at epoch {starts[-1]:g} of {end:g}"
        raise UserError(what, origins.where("recipe.chain"), "shorter pieces, or more epochs")
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


def check(config: Config, origins: Origins) -> None:
    """Raises a UserError where the words of the recipe contradict each other."""
    r = config.recipe
    rising = {"recipe.milestones": r.milestones, "recipe.grow_at": r.grow_at}
    rising |= {f"recipe.chain[{i}].milestones": piece.milestones for i, piece in enumerate(r.chain)}
    for key, epochs_of in rising.items():
        if any(b <= a for a, b in itertools.pairwise([0.0, *epochs_of])):
            raise UserError(f"{key} is {list(epochs_of)}", origins.where(key), "give epochs above 0, each more than the one before")
    steps = r.schedule == "steps"
    by_hand = r.growth == "milestones"
    wrong = [
        (bool(r.warmup_epochs and r.warmup_steps), "recipe.warmup_steps", "a warm-up in epochs and in steps", "keep one of them"),
        (steps and not r.milestones, "recipe.schedule", "schedule=steps without milestones", "recipe.milestones=[30,60,80]"),
        (bool(r.milestones) and not steps, "recipe.milestones", f"milestones for schedule={r.schedule}", "recipe.schedule=steps"),
        (bool(r.chain) and r.schedule != "constant", "recipe.chain", f"a chain and schedule={r.schedule}", "keep one of them"),
        (any(p.epochs is None for p in r.chain[:-1]), "recipe.chain", "a piece without epochs before the last", "give its epochs"),
        (any(p.epochs is not None and p.epochs <= 0 for p in r.chain), "recipe.chain", "a piece of no epochs", "epochs above 0"),
        (any(p.kind == "steps" and not p.milestones for p in r.chain), "recipe.chain", "a piece of steps without milestones", "milestones"),
        (r.growth == "decays" and not steps, "recipe.growth", "growth=decays without decays", "recipe.schedule=steps with milestones"),
        (r.growth == "decays" and not 0 < r.gamma < 1, "recipe.gamma", f"growth=decays with gamma {r.gamma:g}", "gamma between 0 and 1"),
        (r.growth == "decays" and (r.batch_max or 0) < config.batch.size, "recipe.batch_max", "growth=decays without room to grow",
         f"recipe.batch_max={config.batch.size * 8}, say"),
        (r.growth != "decays" and r.batch_max is not None, "recipe.batch_max", f"batch_max with growth={r.growth}", "recipe.growth=decays"),
        (by_hand and (not r.grow_at or len(r.grow_at) != len(r.grow_to)), "recipe.grow_to",
         f"grow_at has {len(r.grow_at)} epochs, grow_to {len(r.grow_to)} batches", "as many of the one as of the other"),
        (by_hand and min(r.grow_to, default=1) < 1, "recipe.grow_to", f"grow_to is {list(r.grow_to)}", "batches of 1 or more"),
        (not by_hand and bool(r.grow_at or r.grow_to), "recipe.grow_at", f"grow_at, grow_to with growth={r.growth}",
         "recipe.growth=milestones"),
        (bool(r.adapt_regime or r.sample_noise) and config.optim.base_batch is None, "optim.base_batch",
         "adapt_regime and sample_noise compare the batch with base_batch, which is left out", "optim.base_batch=128, say"),
    ]  # fmt: skip
    for is_wrong, key, what, fix in wrong:
        if is_wrong:
            raise UserError(what, origins.where(key), fix)

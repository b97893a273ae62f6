"""Keys of the recipe that contradict each other; training/conflicts.py asks for them when the configuration is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hvdtrain.config.schema import Config, RecipeConfig
from hvdtrain.errors import UserError


def check_recipe(config: Config) -> None:
    """Raises UserError for the first contradiction in the recipe."""
    for conflict in recipe_conflicts(config):
        raise conflict


def recipe_conflicts(config: Config) -> Iterator[UserError]:
    """Every contradiction in the recipe that shows without data."""
    for rule in (_schedule, _chain, _warmup, _growth, _reference_batch):
        yield from rule(config)


def _schedule(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    yield from _not_rising("recipe.milestones", recipe.milestones, config.where("recipe.milestones"))
    if recipe.schedule == "steps" and not recipe.milestones:
        yield UserError("recipe.schedule=steps needs recipe.milestones", config.where("recipe.schedule"), "recipe.milestones=[30,60,80]")
    if recipe.schedule != "steps" and recipe.milestones:
        what = f"recipe.milestones needs recipe.schedule=steps; it is {recipe.schedule}"
        yield UserError(what, config.where("recipe.milestones"), "recipe.schedule=steps")


def _chain(config: Config) -> Iterator[UserError]:
    chain, where = config.recipe.chain, config.where("recipe.chain")
    for index, piece in enumerate(chain):
        name = f"recipe.chain[{index}]"
        yield from _not_rising(f"{name}.milestones", piece.milestones, where)
        if (piece.kind == "steps") != bool(piece.milestones):
            what = f"{name} is of kind {piece.kind} {'without' if piece.kind == 'steps' else 'with'} milestones"
            yield UserError(what, where, "{kind: steps, milestones: [30, 60]}")
        if piece.epochs is None and index < len(chain) - 1:
            yield UserError(f"{name} has no epochs, which only the last piece may leave out", where, "give its epochs")
    if chain and config.recipe.schedule != "constant":
        yield UserError(f"recipe.chain and recipe.schedule={config.recipe.schedule} both set the schedule", where, "keep one of them")
    last_start = sum(piece.epochs or 0.0 for piece in chain[:-1])
    if last_start >= config.epochs:
        what = f"recipe.chain's last piece begins at epoch {last_start:g} of {config.epochs}"
        yield UserError(what, where, "shorter pieces, or more epochs")


def _warmup(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    if recipe.warmup_epochs and recipe.warmup_steps:
        what = f"recipe.warmup_epochs={recipe.warmup_epochs:g} and recipe.warmup_steps={recipe.warmup_steps} both set the warm-up's length"
        yield UserError(what, config.where("recipe.warmup_steps"), "keep one of them")
    elif recipe.warmup != "none" and recipe.warmup_epochs >= config.epochs and needs_time_after_warmup(recipe):
        what = f"a warm-up of {recipe.warmup_epochs:g} epochs leaves nothing of {config.epochs} epochs to the schedule"
        yield UserError(what, config.where("recipe.warmup_epochs"), "a shorter warm-up, or more epochs")


def needs_time_after_warmup(recipe: RecipeConfig) -> bool:
    """Whether the schedule falls from the end of the warm-up to the end of the job."""
    return recipe.schedule in ("cosine", "polynomial") or bool(recipe.chain)


def _growth(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    yield from _not_rising("recipe.grow_at", recipe.grow_at, config.where("recipe.grow_at"))
    if recipe.growth == "decays":
        if recipe.schedule != "steps":
            what = f"recipe.growth=decays needs recipe.schedule=steps; it is {recipe.schedule}"
            yield UserError(what, config.where("recipe.growth"), "recipe.schedule=steps with recipe.milestones")
        if not 0 < recipe.gamma < 1:
            what = f"recipe.growth=decays needs recipe.gamma between 0 and 1; it is {recipe.gamma:g}"
            yield UserError(what, config.where("recipe.gamma"), "recipe.gamma=0.1, say")
        if recipe.batch_max is None or recipe.batch_max < config.batch.size:
            what = f"recipe.growth=decays needs recipe.batch_max of batch.size={config.batch.size} or more"
            yield UserError(what, config.where("recipe.batch_max"), f"recipe.batch_max={config.batch.size * 8}, say")
    elif recipe.batch_max is not None:
        what = f"recipe.batch_max needs recipe.growth=decays; it is {recipe.growth}"
        yield UserError(what, config.where("recipe.batch_max"), "recipe.growth=decays")
    if recipe.growth == "milestones":
        if not recipe.grow_at or len(recipe.grow_at) != len(recipe.grow_to):
            what = f"recipe.grow_at has {len(recipe.grow_at)} epochs, recipe.grow_to {len(recipe.grow_to)} batches"
            yield UserError(what, config.where("recipe.grow_to"), "one batch for each epoch")
        if min(recipe.grow_to, default=1) < 1:
            yield UserError(f"recipe.grow_to is {list(recipe.grow_to)}", config.where("recipe.grow_to"), "batches of 1 or more")
    elif recipe.grow_at or recipe.grow_to:
        what = f"recipe.grow_at and recipe.grow_to need recipe.growth=milestones; it is {recipe.growth}"
        yield UserError(what, config.where("recipe.grow_at"), "recipe.growth=milestones")


def _reference_batch(config: Config) -> Iterator[UserError]:
    if (config.recipe.adapt_regime or config.recipe.sample_noise) and config.optim.base_batch is None:
        what = "recipe.adapt_regime and recipe.sample_noise compare the batch with optim.base_batch, which is not set"
        yield UserError(what, config.where("optim.base_batch"), "optim.base_batch=128, say")


def _not_rising(key: str, epochs: Sequence[float], where: str) -> Iterator[UserError]:
    if not all(a < b < math.inf for a, b in itertools.pairwise([0.0, *epochs])):
        yield UserError(f"{key} is {list(epochs)}", where, "epochs above 0, each more than the one before")

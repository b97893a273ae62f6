"""What a recipe's words must not say: each contradiction is told with its key before anything is read or started."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config, PieceConfig
from hvdtrain.errors import UserError


def check(config: Config, provenance: Provenance) -> None:
    """Raises a UserError where the words of the recipe contradict each other."""
    r = config.recipe
    _check_rising("recipe.milestones", r.milestones, provenance.where("recipe.milestones"))
    _check_rising("recipe.grow_at", r.grow_at, provenance.where("recipe.grow_at"))
    for place, piece in enumerate(r.chain):
        _check_piece(f"recipe.chain[{place}]", piece, provenance.where("recipe.chain"))
    steps = r.schedule == "steps"
    by_hand = r.growth == "milestones"
    wrong = [
        (bool(r.warmup_epochs and r.warmup_steps), "recipe.warmup_steps", "a warm-up in epochs and in steps", "keep one of them"),
        (steps and not r.milestones, "recipe.schedule", "schedule=steps without milestones", "recipe.milestones=[30,60,80]"),
        (bool(r.milestones) and not steps, "recipe.milestones", f"milestones for schedule={r.schedule}", "recipe.schedule=steps"),
        (bool(r.chain) and r.schedule != "constant", "recipe.chain", f"a chain and schedule={r.schedule}", "keep one of them"),
        (any(p.epochs is None for p in r.chain[:-1]), "recipe.chain", "a piece without epochs before the last", "give its epochs"),
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
            raise UserError(what, provenance.where(key), fix)


def _check_rising(name: str, epochs: Sequence[float], where: str) -> None:
    if not all(a < b < math.inf for a, b in itertools.pairwise([0.0, *epochs])):
        raise UserError(f"{name} is {list(epochs)}", where, "give epochs above 0, each more than the one before")


def _check_piece(name: str, piece: PieceConfig, where: str) -> None:
    _check_rising(f"{name}.milestones", piece.milestones, where)
    if (piece.kind == "steps") != bool(piece.milestones):
        what = "a piece of steps without milestones" if piece.kind == "steps" else f"milestones in a piece of kind {piece.kind}"
        raise UserError(f"{name} is {what}", where, "{kind: steps, milestones: [30, 60]}")

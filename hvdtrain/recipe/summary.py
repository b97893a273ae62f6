"""The recipe in words: the arithmetic behind the learning rate, on one line, and what the batch does, on another."""

from __future__ import annotations

from hvdtrain.config.schema import Config, PieceConfig
from hvdtrain.recipe import compose
from hvdtrain.recipe.recipe import Recipe, scaling


def lr_words(config: Config, dataset: int) -> str:
    """lr 0.1 x 8192/256 = 3.2 after 5 warm-up epochs (linear scaling, from 0.1), then x 0.1 at epochs 30, 60, 80"""
    r, base_batch = config.recipe, config.optim.base_batch or config.batch.size
    peak, base_lr = compose.peak(config), config.optim.base_lr
    words = f"lr {base_lr:g}"
    if peak != base_lr:
        ratio = f"{config.batch.size}/{base_batch}"
        words += f" x {ratio if r.scale == 'linear' else f'sqrt({ratio})'} = {peak:g}"
    warm = compose.warmup_epochs(config, dataset)
    notes = [f"{r.scale} scaling"] if peak != base_lr else []
    if warm:
        length = f"{r.warmup_steps} warm-up steps" if r.warmup_steps else f"{warm:g} warm-up epoch{'s' * (warm != 1)}"
        words += f" after {length}"
        notes.append(f"{'all at' if r.warmup == 'constant' else 'from'} {compose.warmup_from(config):g}")
    words += f" ({', '.join(notes)})" if notes else ""
    k = compose.stretch(config)
    pieces = r.chain or [PieceConfig(r.schedule, None, 1.0, r.milestones, r.gamma, r.power, r.end_lr)]
    told = [_piece_words(piece, k) for piece in pieces]
    words += "".join(f", then {text}" for text in told if text)
    words += f", taken over by the batch up to {r.batch_max}" if r.growth == "decays" else ""
    if r.growth == "milestones" and r.scale != "none":
        grown = compose.grown(config)
        rates = [f"{peak * scaling(r.scale, b, grown.first):g} from epoch {e:g}" for e, b in zip(grown.at, grown.to, strict=True)]
        words += f"; follows the batch ({r.scale}): {', '.join(rates)}"
    return words + (f"; regime adapted: {k} times the epochs" if k > 1 else "")


def batch_words(recipe: Recipe) -> str:
    """128, 640 from epoch 60, 3200 from epoch 120"""
    return ", ".join([str(recipe.batch.first), *(f"{b} from epoch {e:g}" for e, b in zip(recipe.batch.at, recipe.batch.to, strict=True))])


def _piece_words(piece: PieceConfig, k: int) -> str:
    length = f" for {piece.epochs * k:g} epochs" if piece.epochs else ""
    scale = f" from x {piece.scale:g}" if piece.scale != 1 else ""
    match piece.kind:
        case "steps":
            return f"x {piece.gamma:g} at epochs {', '.join(f'{m * k:g}' for m in piece.milestones)}{scale}{length}"
        case "cosine":
            return f"cosine to {piece.end_lr:g}{scale}{length}"
        case "polynomial":
            return f"polynomial of power {piece.power:g} to {piece.end_lr:g}{scale}{length}"
        case "exponential":
            return f"x {piece.gamma:g} in each {f'{k} epochs' if k > 1 else 'epoch'}{scale}{length}"
    return f"constant{scale}{length}" if scale or length else ""

"""Keys of the recipe that contradict each other; training/conflicts.py checks them when the
configuration is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvdtrain.config.exclusion import (
    Exclusion,
    Values,
    When,
    among,
    default_of,
    options,
    other_than,
    value_of,
)
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.recipe import RecipeConfig
from hvdtrain.core.lengths import read_length
from hvdtrain.errors import UserError
from hvdtrain.recipe.clock import epoch_multiplier, total_epochs

Rule = Callable[[Config], Iterator[UserError]]  # a rule that needs a computation

# schedules that fall until the end of the job or of their piece
FALLING = (
    "cosine",
    "linear",
    "polynomial",
    "one_cycle",
)
SHORTER_WARMUP = "recipe.warmup=10% is a tenth of the job, however short"


def check_recipe(config: Config) -> None:
    """Raises UserError for the first contradiction in the recipe."""
    for conflict in recipe_conflicts(config):
        raise conflict


def recipe_conflicts(config: Config) -> Iterator[UserError]:
    """Yields every contradiction in the recipe that can be detected without data."""
    for row in ROWS:
        yield from row.errors(config) if isinstance(row, Exclusion) else row(config)


def unread_recipe_keys(config: Config) -> list[str]:
    """Returns keys of the recipe that are set but that no schedule of this job reads."""
    return [row.key for row in NO_EFFECT if row.holds(config)]


def needs_time_after_warmup(recipe: RecipeConfig) -> bool:
    """Whether the schedule falls from the end of the warm-up to the end of the job."""
    return recipe.schedule in FALLING or bool(recipe.chain)


def _is(schedule: str) -> When:
    return lambda config: config.recipe.schedule == schedule


def _grows_by(growth: str) -> When:
    return lambda config: config.recipe.growth == growth


def _has_function(config: Config) -> bool:
    return config.recipe.function is not None


def _has_chain(config: Config) -> bool:
    return bool(config.recipe.chain)


def _has_no_known_end(config: Config) -> bool:
    """Whether only time ends a job: then a schedule cannot know its length, yet each rank and each
    resume must use the same rates."""
    return total_epochs(config) is None and config.stop.steps is None


def _set(key: str, example: Any) -> Values:
    return other_than(default_of(key), example)


# keys of the recipe: the schedules that read them
_READ_BY = {
    "gamma": ("steps", "exponential", "plateau"),
    "power": ("polynomial",),
    "end_lr": (
        "cosine",
        "linear",
        "polynomial",
        "plateau",
        "one_cycle",
    ),  # it has a separate message
    "floor": ("steps", "exponential", "cosine", "linear", "polynomial", "plateau", "one_cycle"),
}


def _is_read(name: str, config: Config) -> bool:
    recipe = config.recipe
    return (
        recipe.schedule in _READ_BY[name]
        or (name == "gamma" and recipe.growth == "decays")
        or (name == "floor" and (_has_chain(config) or _has_function(config)))
    )


def _unread(name: str, example: float, in_chain: bool) -> Exclusion:
    """Returns the exclusion of a key in _READ_BY. in_chain: in a configuration with
    recipe.chain."""
    piece = "; a piece of recipe.chain has its own" if in_chain and name != "floor" else ""
    return Exclusion(
        f"recipe.{name}",
        _set(f"recipe.{name}", example),
        what="{key} has no effect: recipe.schedule={config.recipe.schedule} does not use it",
        fix=f"recipe.schedule={' or '.join(_READ_BY[name])}, or leave it out{piece}",
        when=lambda config: not _is_read(name, config) and _has_chain(config) == in_chain,
    )


def _only(schedule: str, name: str, example: Any, instead: str = "") -> Exclusion:
    """Returns the exclusion of a key that only one schedule reads."""
    return Exclusion(
        f"recipe.{name}",
        _set(f"recipe.{name}", example),
        what=f"{{key}} needs recipe.schedule={schedule}; it is {{config.recipe.schedule}}",
        fix=f"recipe.schedule={schedule}{instead}",
        when=lambda config: config.recipe.schedule != schedule,
    )


OF_SCHEDULES = tuple(
    _unread(name, example, in_chain)
    for name, example in (("gamma", 0.5), ("power", 3), ("end_lr", 0.001), ("floor", 0.1))
    for in_chain in (False, True)
)
OF_WARMUP = options(
    "recipe.warmup",
    {"recipe.warmup_kind": "constant", "recipe.warmup_from": 0.01},
    fix="recipe.warmup=5%",
    when=lambda config: not read_length(config.recipe.warmup).amount,
)
OF_STEPS = _only("steps", "milestones", [1])
OF_PLATEAU = (
    _only("plateau", "patience", 3, "; or stop.patience"),
    _only("plateau", "threshold", 0.1),
    _only("plateau", "threshold_mode", "abs"),
    _only("plateau", "cooldown", 2),
)
OF_ONE_CYCLE = _only("one_cycle", "cycle_momentum", [0.8, 0.9])
NO_EFFECT = (*OF_SCHEDULES, *OF_WARMUP, OF_STEPS, *OF_PLATEAU, OF_ONE_CYCLE)
KEYS_OF_SCHEDULES = tuple(
    dict.fromkeys(row.key for row in (*OF_SCHEDULES, OF_STEPS, *OF_PLATEAU, OF_ONE_CYCLE))
)


def _rises(key: str) -> Rule:
    return lambda config: _not_rising(key, value_of(config, key), config.where(key))


def _is_no_momentum(momentum: list[float]) -> bool:
    is_pair = len(momentum) == 2 and 0 <= momentum[0] <= momentum[1] < 1
    return bool(momentum) and not is_pair


def _chain(config: Config) -> Iterator[UserError]:
    chain = config.recipe.chain
    where = config.where("recipe.chain")
    for index, piece in enumerate(chain):
        name = f"recipe.chain[{index}]"
        yield from _not_rising(f"{name}.milestones", piece.milestones, where)
        if (piece.kind == "steps") != bool(piece.milestones):
            what = (
                f"{name} is of kind {piece.kind} {'without' if piece.kind == 'steps' else 'with'} "
                "milestones"
            )
            yield UserError(what, where, "{kind: steps, milestones: [30, 60]}")
        if piece.length is None and index < len(chain) - 1:
            yield UserError(
                f"{name} has no length; only the last piece may omit it",
                where,
                "give its length: 5, or 500 steps",
            )


def _warmup(config: Config) -> Iterator[UserError]:
    """Yields errors of a warm-up in epochs; warm-ups in other units are checked when the data are
    known (recipe/from_config.py)."""
    length = read_length(config.recipe.warmup)
    epochs = total_epochs(config)
    if length.unit != "epochs" or epochs is None or not needs_time_after_warmup(config.recipe):
        return
    if length.amount * epoch_multiplier(config) >= epochs:
        words = length.words(epoch_multiplier(config))
        what = (
            f"a warm-up of {words} leaves nothing of {epochs:g} epoch{'s' if epochs != 1 else ''} "
            "for the schedule"
        )
        yield UserError(
            what,
            config.where("recipe.warmup"),
            f"{SHORTER_WARMUP}; or epochs={int(length.amount) + 1} or more",
        )


def _shares_of_no_end(config: Config) -> Iterator[UserError]:
    if not _has_no_known_end(config):
        return
    unknown = f"only stop.time={config.stop.time} ends the job, at an unknown step"
    fix = "a length in epochs, steps, samples or tokens; or also set stop.steps or epochs"
    for key, lengths in _lengths(config).items():
        for length in lengths:
            if read_length(length).unit == "%":
                what = f"{key}: {length} is a share of the job, but {unknown}"
                yield UserError(what, config.where(key), fix)


def _lengths(config: Config) -> dict[str, list[float | str]]:
    """Returns every length that the recipe converts, by key."""
    recipe = config.recipe
    of_chain = [
        length
        for piece in recipe.chain
        for length in (piece.length, *piece.milestones)
        if length is not None
    ]
    return {
        "recipe.warmup": [recipe.warmup],
        "recipe.milestones": recipe.milestones,
        "recipe.grow_at": recipe.grow_at,
        "recipe.chain": of_chain,
        "comm.local_from": [config.comm.local_from],
        "model.thaw": [entry.at for entry in config.model.thaw],
    }


def _largest_batch(config: Config) -> Iterator[UserError]:
    size = config.batch.size
    if config.recipe.growth == "decays" and (config.recipe.batch_max or 0) < size:
        yield UserError(
            f"recipe.growth=decays needs recipe.batch_max of batch.size={size} or more",
            config.where("recipe.batch_max"),
            f"recipe.batch_max={size * 8}, say",
        )


def _as_many_batches(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    lengths = len(recipe.grow_at)
    batches = len(recipe.grow_to)
    if recipe.growth == "milestones" and (not lengths or lengths != batches):
        yield UserError(
            f"recipe.grow_at has {lengths} lengths, recipe.grow_to {batches} batches",
            config.where("recipe.grow_to"),
            "one batch for each length",
        )


def _ends_of_growth(growth: str, key: str) -> Rule:
    """Returns the rule for shares of a job at which its batch grows."""
    grows = _grows_by(growth)
    return lambda config: (
        _shares_of_two_ends(config, key, value_of(config, key)) if grows(config) else iter(())
    )


def _shares_of_two_ends(
    config: Config, key: str, lengths: Sequence[float | str]
) -> Iterator[UserError]:
    """Rejects shares of a job with two ends: which end comes first depends on the batches, and
    these on the shares."""
    if total_epochs(config) is None or config.stop.steps is None:
        return
    for length in lengths:
        if read_length(length).unit == "%":
            what = (
                f"{key}: the batch grows at {length} of the job, but either epochs or stop.steps "
                "may end it"
            )
            yield UserError(
                what,
                config.where(key),
                "epochs=null or stop.steps=null; or a length in epochs, steps, samples or tokens",
            )


def _not_rising(key: str, lengths: Sequence[float | str], where: str) -> Iterator[UserError]:
    """Yields errors for lengths in one unit that are not ascending; lengths in different units are
    compared when the data are known (recipe/from_config.py)."""
    given = [read_length(length) for length in lengths]
    first_is_0 = bool(given) and given[0].amount == 0
    if first_is_0 or any(
        a.unit == b.unit and a.amount >= b.amount for a, b in itertools.pairwise(given)
    ):
        yield UserError(
            f"{key} is {list(lengths)}", where, "lengths above 0, each more than the one before"
        )


NO_END = "only stop.time={config.stop.time} ends the job, at an unknown step"
LONGER = (
    "also set stop.steps or epochs; the job ends with whichever comes first; or recipe.chain "
    "with a length for each piece"
)
# in the order of reporting: the first one becomes the message
ROWS: tuple[Exclusion | Rule, ...] = (
    *OF_SCHEDULES,
    *OF_WARMUP,
    _rises("recipe.milestones"),
    Exclusion(
        "recipe.milestones",
        among([]),
        what="recipe.schedule=steps needs recipe.milestones",
        fix="recipe.milestones=[30,60,80]",
        where="recipe.schedule",
        when=_is("steps"),
    ),
    OF_STEPS,
    Exclusion(
        "recipe.gamma",
        Values(lambda gamma: gamma >= 1, 1),
        what="recipe.schedule=plateau multiplies the rate by {key}={config.recipe.gamma:g}, which "
        "does not lower it",
        fix="recipe.gamma=0.1, or another number below 1",
        when=_is("plateau"),
    ),
    *OF_PLATEAU,
    Exclusion(
        "recipe.warmup",
        Values(lambda length: bool(read_length(length).amount), 1),
        what="recipe.schedule=one_cycle has its own warm-up, 30% of the job",
        fix="recipe.warmup=0",
        when=_is("one_cycle"),
    ),
    OF_ONE_CYCLE,
    Exclusion(
        "recipe.cycle_momentum",
        Values(_is_no_momentum, [0.9]),
        what="{key} is {config.recipe.cycle_momentum}",
        fix="two numbers, at least 0 and less than 1, the smaller one first: [0.85,0.95]",
    ),
    Exclusion(
        "optim.momentum",
        other_than(None, 0.9),
        what="optim.momentum and recipe.cycle_momentum both set the momentum",
        fix="one of them",
        when=lambda config: bool(config.recipe.cycle_momentum),
    ),
    Exclusion(
        "recipe.end_lr",
        Values(bool, 0.001),
        what="recipe.schedule=one_cycle falls to a 250,000th of the rate, whatever {key} is",
        fix="recipe.end_lr=0",
        where="recipe.schedule",
        when=_is("one_cycle"),
    ),
    Exclusion(
        "recipe.chain",
        Values(bool, ["{kind: cosine}"]),
        what="recipe.function and {key} both set the schedule",
        fix="keep one of them",
        where="recipe.function",
        when=_has_function,
    ),
    Exclusion(
        "recipe.schedule",
        other_than("constant", "cosine"),
        what="recipe.function and {set} both set the schedule",
        fix="keep one of them",
        where="recipe.function",
        when=lambda config: _has_function(config) and not _has_chain(config),
    ),
    Exclusion(
        "recipe.function",
        other_than(None, "mine:rate"),
        what="{key} depends on the share of the job that is done, but only "
        "stop.time={config.stop.time} ends it, at an unknown step",
        fix="also set stop.steps or epochs; the job ends with whichever comes first",
        when=_has_no_known_end,
    ),
    _chain,
    Exclusion(
        "recipe.schedule",
        other_than("constant", "cosine"),
        what="recipe.chain and {set} both set the schedule",
        fix="keep one of them",
        where="recipe.chain",
        when=_has_chain,
    ),
    _warmup,
    Exclusion(
        "recipe.schedule",
        among(*FALLING),
        what=f"{{set}} falls to the end of the job, but {NO_END}",
        fix=LONGER,
        when=_has_no_known_end,
    ),
    Exclusion(
        "recipe.chain",
        Values(
            lambda chain: bool(chain) and chain[-1].kind in FALLING and chain[-1].length is None,
            ["{kind: cosine}"],
        ),
        what=f"the last piece of recipe.chain falls to the end of the job, but {NO_END}",
        fix=LONGER,
        when=_has_no_known_end,
    ),
    _shares_of_no_end,
    _rises("recipe.grow_at"),
    Exclusion(
        "recipe.schedule",
        other_than("steps", "cosine"),
        what="recipe.growth=decays needs recipe.schedule=steps; it is {config.recipe.schedule}",
        fix="recipe.schedule=steps with recipe.milestones",
        where="recipe.growth",
        when=_grows_by("decays"),
    ),
    Exclusion(
        "recipe.gamma",
        Values(lambda gamma: not 0 < gamma < 1, 1),
        what="recipe.growth=decays needs {key} between 0 and 1; it is {config.recipe.gamma:g}",
        fix="recipe.gamma=0.1, say",
        when=_grows_by("decays"),
    ),
    _largest_batch,
    _ends_of_growth("decays", "recipe.milestones"),
    Exclusion(
        "recipe.batch_max",
        other_than(None, 64),
        what="{key} needs recipe.growth=decays; it is {config.recipe.growth}",
        fix="recipe.growth=decays",
        when=lambda config: config.recipe.growth != "decays",
    ),
    _as_many_batches,
    Exclusion(
        "recipe.grow_to",
        Values(lambda batches: min(batches, default=1) < 1, [0]),
        what="recipe.grow_to is {config.recipe.grow_to}",
        fix="batches of 1 or more",
        when=_grows_by("milestones"),
    ),
    _ends_of_growth("milestones", "recipe.grow_at"),
    Exclusion(
        "recipe.growth",
        other_than("milestones", "none"),
        what="recipe.grow_at and recipe.grow_to need recipe.growth=milestones; it is "
        "{config.recipe.growth}",
        fix="recipe.growth=milestones",
        where="recipe.grow_at",
        when=lambda config: bool(config.recipe.grow_at or config.recipe.grow_to),
    ),
    Exclusion(
        "optim.base_batch",
        among(None),
        what="recipe.adapt_regime and recipe.sample_noise compare the batch with optim.base_batch, "
        "which is not set",
        fix="optim.base_batch=128, say",
        when=lambda config: config.recipe.adapt_regime or bool(config.recipe.sample_noise),
    ),
)

"""Keys of the recipe that contradict each other; training/conflicts.py asks for them when the
configuration is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hvdtrain.config.lengths import read_length
from hvdtrain.config.schema import Config, RecipeConfig
from hvdtrain.errors import UserError
from hvdtrain.recipe.clock import epoch_multiplier, total_epochs

# schedules that end with the job, or with their piece
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
    """Every contradiction in the recipe that shows without data."""
    for rule in (
        _without_effect,
        _schedule,
        _plateau,
        _one_cycle,
        _function,
        _chain,
        _warmup,
        _end,
        _growth,
        _reference_batch,
    ):
        yield from rule(config)


_OF_PLATEAU = ("patience", "threshold", "threshold_mode", "cooldown")
# keys of the recipe: the schedules that read them; _OF_ONE has those with a message of their own
_READ_BY = {
    "gamma": ("steps", "exponential", "plateau"),
    "power": ("polynomial",),
    "end_lr": (
        "cosine",
        "linear",
        "polynomial",
        "plateau",
        "one_cycle",
    ),  # of which _one_cycle() refuses it
    "floor": ("steps", "exponential", "cosine", "linear", "polynomial", "plateau", "one_cycle"),
}
_OF_ONE = {
    **dict.fromkeys(_OF_PLATEAU, "plateau"),
    "milestones": "steps",
    "cycle_momentum": "one_cycle",
}


def unread_recipe_keys(config: Config) -> list[str]:
    """Keys of the recipe that are set and that no schedule of this job reads."""
    recipe = config.recipe
    of_others = [name for name, schedule in _OF_ONE.items() if recipe.schedule != schedule]
    unread = [*_without_schedule(recipe), *_without_warmup(recipe), *_set_of(recipe, of_others)]
    return [f"recipe.{name}" for name in unread]


def _set_of(recipe: RecipeConfig, names: Iterable[str]) -> list[str]:
    """Names of the keys that have another value than their default."""
    fields = type(recipe).model_fields
    return [
        name
        for name in names
        if getattr(recipe, name) != fields[name].get_default(call_default_factory=True)
    ]


def _without_schedule(recipe: RecipeConfig) -> list[str]:
    read = {name for name, schedules in _READ_BY.items() if recipe.schedule in schedules}
    if recipe.growth == "decays":
        read.add("gamma")
    if recipe.chain or recipe.function:
        read.add("floor")
    return _set_of(recipe, [name for name in _READ_BY if name not in read])


def _without_warmup(recipe: RecipeConfig) -> list[str]:
    if read_length(recipe.warmup).amount:
        return []
    return _set_of(recipe, ("warmup_kind", "warmup_from"))


def _without_effect(config: Config) -> Iterator[UserError]:
    """Errors of keys that no schedule of this job reads."""
    recipe = config.recipe
    for name in _without_schedule(recipe):
        schedules = _READ_BY[name]
        what = f"recipe.{name} has no effect: recipe.schedule={recipe.schedule} does not read it"
        piece = "; a piece of recipe.chain has its own" if recipe.chain and name != "floor" else ""
        yield UserError(
            what,
            config.where(f"recipe.{name}"),
            f"recipe.schedule={' or '.join(schedules)}, or leave it out{piece}",
        )
    for name in _without_warmup(recipe):
        what = f"recipe.{name} has no effect without recipe.warmup"
        yield UserError(what, config.where(f"recipe.{name}"), "recipe.warmup=5%, or leave it out")


def _schedule(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    yield from _not_rising(
        "recipe.milestones", recipe.milestones, config.where("recipe.milestones")
    )
    if recipe.schedule == "steps" and not recipe.milestones:
        yield UserError(
            "recipe.schedule=steps needs recipe.milestones",
            config.where("recipe.schedule"),
            "recipe.milestones=[30,60,80]",
        )
    if recipe.schedule != "steps" and recipe.milestones:
        what = f"recipe.milestones needs recipe.schedule=steps; it is {recipe.schedule}"
        yield UserError(what, config.where("recipe.milestones"), "recipe.schedule=steps")


def _plateau(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    if recipe.schedule == "plateau":
        if recipe.gamma >= 1:
            what = (
                f"recipe.schedule=plateau multiplies the rate by recipe.gamma={recipe.gamma:g}, "
                "which does not lower it"
            )
            yield UserError(
                what, config.where("recipe.gamma"), "recipe.gamma=0.1, or another number below 1"
            )
        if config.servers.log:
            what = (
                "servers.log replays steps from their positions in the job, and with "
                "recipe.schedule=plateau evaluations change the rate"
            )
            yield UserError(
                what, config.where("servers.log"), "servers.log=false, or another recipe.schedule"
            )
        return
    for key in _set_of(recipe, _OF_PLATEAU):
        what = f"recipe.{key} needs recipe.schedule=plateau; it is {recipe.schedule}"
        yield UserError(
            what,
            config.where(f"recipe.{key}"),
            f"recipe.schedule=plateau{'; or stop.patience' if key == 'patience' else ''}",
        )


def _one_cycle(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    where = config.where("recipe.schedule")
    momentum = recipe.cycle_momentum
    if recipe.schedule == "one_cycle" and read_length(recipe.warmup).amount:
        yield UserError(
            "recipe.schedule=one_cycle has its own warm-up, 30% of the job",
            config.where("recipe.warmup"),
            "recipe.warmup=0",
        )
    if momentum and recipe.schedule != "one_cycle":
        what = f"recipe.cycle_momentum needs recipe.schedule=one_cycle; it is {recipe.schedule}"
        yield UserError(what, config.where("recipe.cycle_momentum"), "recipe.schedule=one_cycle")
    if momentum and (len(momentum) != 2 or not 0 <= momentum[0] <= momentum[1] < 1):
        fix = "two numbers from 0 to less than 1, the smaller one first: [0.85,0.95]"
        yield UserError(
            f"recipe.cycle_momentum is {list(momentum)}", config.where("recipe.cycle_momentum"), fix
        )
    if momentum and config.optim.momentum is not None:
        yield UserError(
            "optim.momentum and recipe.cycle_momentum both set the momentum",
            config.where("optim.momentum"),
            "one of them",
        )
    if recipe.schedule == "one_cycle" and recipe.end_lr:
        yield UserError(
            "recipe.schedule=one_cycle falls to a 250,000th of the rate, whatever recipe.end_lr is",
            where,
            "recipe.end_lr=0",
        )


def _function(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    where = config.where("recipe.function")
    if recipe.function is None:
        return
    if recipe.schedule != "constant" or recipe.chain:
        other = "recipe.chain" if recipe.chain else f"recipe.schedule={recipe.schedule}"
        yield UserError(
            f"recipe.function and {other} both set the schedule", where, "keep one of them"
        )
    if total_epochs(config) is None and config.stop.steps is None:
        what = (
            f"recipe.function is of the share of the job, and stop.time={config.stop.time} alone "
            "ends it, at a step not known before"
        )
        yield UserError(
            what, where, "stop.steps or epochs as well, and the job ends with whichever comes first"
        )


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
                f"{name} has no length, which only the last piece may leave out",
                where,
                "give its length: 5, or 500 steps",
            )
    if chain and config.recipe.schedule != "constant":
        yield UserError(
            f"recipe.chain and recipe.schedule={config.recipe.schedule} both set the schedule",
            where,
            "keep one of them",
        )


def _warmup(config: Config) -> Iterator[UserError]:
    """Errors of a warm-up in epochs; others are compared where the data are known
    (recipe/from_config.py)."""
    length = read_length(config.recipe.warmup)
    epochs = total_epochs(config)
    if length.unit != "epochs" or epochs is None or not needs_time_after_warmup(config.recipe):
        return
    if length.amount * epoch_multiplier(config) >= epochs:
        words = length.words(epoch_multiplier(config))
        what = (
            f"a warm-up of {words} leaves nothing of {epochs:g} epoch{'s' if epochs != 1 else ''} "
            "to the schedule"
        )
        yield UserError(
            what,
            config.where("recipe.warmup"),
            f"{SHORTER_WARMUP}; or epochs={int(length.amount) + 1} or more",
        )


def _end(config: Config) -> Iterator[UserError]:
    """A job that only its time ends has no length that a schedule could know: each rank and each
    resume must have the same rates."""
    recipe = config.recipe
    if total_epochs(config) is not None or config.stop.steps is not None:
        return
    unknown = f"stop.time={config.stop.time} alone ends the job, at a step that is not known before"
    fix = (
        "stop.steps or epochs as well, and the job ends with whichever comes first; or "
        "recipe.chain with a length of each piece"
    )
    if recipe.schedule in FALLING:
        what = f"recipe.schedule={recipe.schedule} falls to the end of the job; {unknown}"
        yield UserError(what, config.where("recipe.schedule"), fix)
    if recipe.chain and recipe.chain[-1].kind in FALLING and recipe.chain[-1].length is None:
        yield UserError(
            f"the last piece of recipe.chain falls to the end of the job; {unknown}",
            config.where("recipe.chain"),
            fix,
        )
    for key, lengths in _lengths(config).items():
        for length in lengths:
            if read_length(length).unit == "%":
                fix = (
                    "a length in epochs, steps, samples or tokens; or stop.steps or epochs as well"
                )
                yield UserError(
                    f"{key}: {length} is a share of the job; {unknown}", config.where(key), fix
                )


def _lengths(config: Config) -> dict[str, list[float | str]]:
    """Every length that the recipe converts, by its key."""
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


def needs_time_after_warmup(recipe: RecipeConfig) -> bool:
    """Whether the schedule falls from the end of the warm-up to the end of the job."""
    return recipe.schedule in FALLING or bool(recipe.chain)


def _growth(config: Config) -> Iterator[UserError]:
    recipe = config.recipe
    yield from _not_rising("recipe.grow_at", recipe.grow_at, config.where("recipe.grow_at"))
    if recipe.growth == "decays":
        if recipe.schedule != "steps":
            what = f"recipe.growth=decays needs recipe.schedule=steps; it is {recipe.schedule}"
            yield UserError(
                what, config.where("recipe.growth"), "recipe.schedule=steps with recipe.milestones"
            )
        if not 0 < recipe.gamma < 1:
            what = (
                f"recipe.growth=decays needs recipe.gamma between 0 and 1; it is {recipe.gamma:g}"
            )
            yield UserError(what, config.where("recipe.gamma"), "recipe.gamma=0.1, say")
        if recipe.batch_max is None or recipe.batch_max < config.batch.size:
            what = (
                f"recipe.growth=decays needs recipe.batch_max of batch.size={config.batch.size} "
                "or more"
            )
            yield UserError(
                what,
                config.where("recipe.batch_max"),
                f"recipe.batch_max={config.batch.size * 8}, say",
            )
        yield from _shares_of_two_ends(config, "recipe.milestones", recipe.milestones)
    elif recipe.batch_max is not None:
        what = f"recipe.batch_max needs recipe.growth=decays; it is {recipe.growth}"
        yield UserError(what, config.where("recipe.batch_max"), "recipe.growth=decays")
    if recipe.growth == "milestones":
        if not recipe.grow_at or len(recipe.grow_at) != len(recipe.grow_to):
            what = (
                f"recipe.grow_at has {len(recipe.grow_at)} lengths, recipe.grow_to "
                f"{len(recipe.grow_to)} batches"
            )
            yield UserError(what, config.where("recipe.grow_to"), "one batch for each length")
        if min(recipe.grow_to, default=1) < 1:
            yield UserError(
                f"recipe.grow_to is {list(recipe.grow_to)}",
                config.where("recipe.grow_to"),
                "batches of 1 or more",
            )
        yield from _shares_of_two_ends(config, "recipe.grow_at", recipe.grow_at)
    elif recipe.grow_at or recipe.grow_to:
        what = (
            "recipe.grow_at and recipe.grow_to need recipe.growth=milestones; it is "
            f"{recipe.growth}"
        )
        yield UserError(what, config.where("recipe.grow_at"), "recipe.growth=milestones")


def _reference_batch(config: Config) -> Iterator[UserError]:
    if (
        config.recipe.adapt_regime or config.recipe.sample_noise
    ) and config.optim.base_batch is None:
        what = (
            "recipe.adapt_regime and recipe.sample_noise compare the batch with optim.base_batch, "
            "which is not set"
        )
        yield UserError(what, config.where("optim.base_batch"), "optim.base_batch=128, say")


def _shares_of_two_ends(
    config: Config, key: str, lengths: Sequence[float | str]
) -> Iterator[UserError]:
    """Which of two ends comes first depends on the batches, and these on the shares."""
    if total_epochs(config) is None or config.stop.steps is None:
        return
    for length in lengths:
        if read_length(length).unit == "%":
            what = (
                f"{key}: the batch grows at {length} of the job, which epochs and stop.steps both "
                "may end"
            )
            yield UserError(
                what,
                config.where(key),
                "epochs=null or stop.steps=null; or a length in epochs, steps, samples or tokens",
            )


def _not_rising(key: str, lengths: Sequence[float | str], where: str) -> Iterator[UserError]:
    """Errors of lengths in one unit that do not rise; others are compared where the data are known
    (recipe/from_config.py)."""
    given = [read_length(length) for length in lengths]
    first_is_0 = bool(given) and given[0].amount == 0
    if first_is_0 or any(
        a.unit == b.unit and a.amount >= b.amount for a, b in itertools.pairwise(given)
    ):
        yield UserError(
            f"{key} is {list(lengths)}", where, "lengths above 0, each more than the one before"
        )

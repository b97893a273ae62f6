"""Options that conflict with each other, an engine, a framework or a number of ranks. Every command
checks them when it reads the configuration.

train, check, plan and bench call refuse_conflicts() or one of its two variants before data or a
model exist. Each feature in hvdtrain/features declares what it excludes. Checks that need more than
the configuration, the engine's name and the number of ranks stay with the code that has the
information: the shape of the data, the layers of the model, the GPUs and compilers of a host.
"""

from __future__ import annotations

from hvdtrain.comm.engines import features_of, possible_engines
from hvdtrain.comm.launcher_variables import NO_LAUNCHER, Placement
from hvdtrain.comm.rendezvous import parse_address
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementation, load
from hvdtrain.core.lengths import parse_duration
from hvdtrain.errors import UserError
from hvdtrain.features.every_feature import conflicts_of
from hvdtrain.features.job_feature import PlannedJob
from hvdtrain.frameworks.by_name import build_rule, is_made_with_the_model
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.training.build import engine_of


def refuse_conflicts(config: Config, engine: str, ranks: int) -> None:
    """Raises UserError for the first conflict of a job with this engine (as in comm.engine=NAME,
    never auto) and number of ranks."""
    _check_single_options(config)
    for conflict in conflicts_of(PlannedJob(config, engine, features_of(engine), ranks)):
        raise conflict


def refuse_before_connecting(config: Config, place: Placement) -> None:
    """Calls refuse_conflicts() before the engine starts, if this process knows the number of ranks
    and the whole configuration.

    It is skipped without a known launcher, and with resume=RUN, whose configuration some ranks may
    not see yet.
    """
    if place.launcher != NO_LAUNCHER.launcher and config.resume in ("auto", "no"):
        engine = engine_of(config, place).engine
        refuse_conflicts(resolve_batch_size(config, place.size), engine, place.size)


def refuse_on_every_engine(config: Config, ranks: int) -> None:
    """Checks conflicts when the launcher is unknown: raises UserError if none of the engines that
    comm.engine allows fits."""
    errors = []
    for engine in possible_engines(config.comm.engine, ranks):
        try:
            refuse_conflicts(config, engine, ranks)
        except UserError as error:
            errors.append(error)
        else:
            return
    texts = [str(error) for error in errors]
    # the reason that most engines have, or the first engine's
    raise max(errors, key=lambda error: texts.count(str(error)))


def _check_single_options(config: Config) -> None:
    """Raises UserError for invalid values that the schema's types and bounds accept."""
    for key, time in {
        "guard.max_time": config.guard.max_time,
        "stop.time": config.stop.time,
    }.items():
        if time is not None:
            parse_duration(time, config.where(key))
    if config.comm.address is not None:
        parse_address(config.comm.address, config.where("comm.address"))
    if config.profile.steps is not None:
        where = config.where("profile.steps")
        profiler = load(implementation("profile.steps"), "traces steps", "profile.steps", where)
        profiler.steps_of(config)
    if not is_made_with_the_model(config):
        build_rule(config)

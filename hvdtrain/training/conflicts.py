"""Options that exclude each other, an engine, a framework or a number of ranks: found when the configuration is read, by every command.

train, check, plan and bench call refuse_conflicts() or one of its two variants before data or a model exist. Each rule judges one option.
What needs more than the configuration, the engine's name and the number of ranks stays with the code that knows it: the shape of the
data, the layers of the model, the GPUs and compilers of a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hvdtrain.comm.features import Feature, features_of
from hvdtrain.comm.placement import NO_LAUNCHER, Placement
from hvdtrain.comm.rendezvous import parse_address
from hvdtrain.comm.select_engine import possible_engines
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.build_rule import build_rule
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.recipe.conflicts import recipe_conflicts
from hvdtrain.training.build import engine_of
from hvdtrain.training.health.deadline import parse_duration
from hvdtrain.training.telemetry.profiler import parse_profile_steps


class PlannedJob(NamedTuple):
    """What is known of a job before anything is built."""

    config: Config
    engine: str
    features: frozenset[Feature]  # of the engine, on every machine
    ranks: int

    def where(self, key: str) -> str:
        """The key and where it was set."""
        return self.config.where(key)


Rule = Callable[[PlannedJob], Iterator[UserError]]


def refuse_conflicts(config: Config, engine: str, ranks: int) -> None:
    """Raises UserError for the first conflict of a job with this engine (as in comm.engine=NAME, never auto) on so many ranks."""
    _check_single_options(config)
    job = PlannedJob(config, engine, features_of(engine), ranks)
    for rule in RULES:
        for conflict in rule(job):
            raise conflict


def refuse_before_connecting(config: Config, place: Placement) -> None:
    """As refuse_conflicts(), before the engine starts, where this process knows the number of ranks and the whole configuration.

    It does not without a launcher that is known, nor with resume=RUN, whose configuration rank 0 alone reads.
    """
    if place.launcher != NO_LAUNCHER.launcher and config.resume in ("auto", "no"):
        engine = engine_of(config, place).engine
        refuse_conflicts(resolve_batch_size(config, place.size), engine, place.size)


def refuse_on_every_engine(config: Config, ranks: int) -> None:
    """As refuse_conflicts(), where the launcher is not known: raises UserError where no engine that comm.engine allows fits."""
    errors = []
    for engine in possible_engines(config.comm.engine, ranks):
        try:
            refuse_conflicts(config, engine, ranks)
        except UserError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


def _check_single_options(config: Config) -> None:
    """Raises UserError for values that make no sense by themselves and that the schema's types and bounds let through."""
    if config.guard.max_time is not None:
        parse_duration(config.guard.max_time, config.where("guard.max_time"))
    if config.comm.address is not None:
        parse_address(config.comm.address, config.where("comm.address"))
    parse_profile_steps(config.profile.steps, config.where("profile.steps"))
    if config.framework != "torch" or not is_dotted(config.optim.name):  # a class of torch.optim is made with the model
        build_rule(config)


def single_process(job: PlannedJob) -> Iterator[UserError]:
    if job.ranks > 1 and "several_ranks" not in job.features:
        what = f"comm.engine={job.engine} is for one process; the job has {job.ranks} ranks"
        yield UserError(what, job.where("comm.engine"), "comm.engine=auto")


def batch_size(job: PlannedJob) -> Iterator[UserError]:
    """Every rank needs a sample of every step."""
    smallest = {"batch.size": job.config.batch.size, "recipe.grow_to": min(job.config.recipe.grow_to, default=job.ranks)}
    for key, samples in smallest.items():
        if samples < job.ranks:
            what = f"batch {samples} does not split over {job.ranks} ranks: some would have no sample"
            yield UserError(what, job.where(key), f"{job.ranks} or more, or fewer ranks")


def framework(job: PlannedJob) -> Iterator[UserError]:
    """framework=jax and framework=numpy do less than framework=torch."""
    supported = SUPPORTED_VALUES.get(job.config.framework, {})
    for key, values in supported.items():
        value = _value(job.config, key)
        if value not in values:
            what = f"framework={job.config.framework} does not support {key}={_as_yaml(value)}"
            yield UserError(what, job.where(key), f"{key}={_as_yaml(values[0])}, or framework=torch")


def compression(job: PlannedJob) -> Iterator[UserError]:
    """comm.compression halves the bytes that a gradient has on its way."""
    comm = job.config.comm
    if comm.compression == "bf16" and "bfloat16_sums" not in job.features:
        what = f"comm.compression=bf16 needs sums of bfloat16, which the {job.engine} engine does not have"
        yield UserError(what, job.where("comm.compression"), "comm.compression=fp16, or another comm.engine")
    if comm.compression != "none" and job.config.speed.precision == "fp64":
        what = f"comm.compression={comm.compression} would round the gradients of speed.precision=fp64"
        yield UserError(what, job.where("comm.compression"), "comm.compression=none")


def adasum(job: PlannedJob) -> Iterator[UserError]:
    if job.config.comm.op != "adasum":
        return
    if "adasum" not in job.features:
        what = f"comm.op=adasum needs the horovod engine; this is {job.engine}"
        yield UserError(what, job.where("comm.op"), "comm.engine=horovod, or comm.op=mean")
    if job.ranks & (job.ranks - 1):
        what = f"comm.op=adasum needs 2, 4, 8, ... ranks; the job has {job.ranks}"
        yield UserError(what, job.where("comm.op"), "another number of ranks, or comm.op=mean")


def local_steps(job: PlannedJob) -> Iterator[UserError]:
    """With comm.local_steps ranks update their own weights for some steps, without a gradient in common."""
    config, steps = job.config, job.config.comm.local_steps
    if steps == 1:
        return
    for key, every in {"log.every_steps": config.log.every_steps, "checkpoint.every_steps": config.checkpoint.every_steps}.items():
        if every is not None and every % steps:
            what = f"comm.local_steps={steps} does not divide {key}={every}; ranks synchronize at both"
            next_multiple = -(-every // steps) * steps
            yield UserError(what, job.where("comm.local_steps"), f"{key}={next_multiple}, or another multiple of {steps}")
    if config.speed.precision == "fp16":
        what = f"comm.local_steps={steps} with speed.precision=fp16 gives each rank a loss scale of its own"
        yield UserError(what, job.where("comm.local_steps"), "speed.precision=bf16, or comm.local_steps=1")
    if config.guard.nonfinite == "skip":
        what = f"comm.local_steps={steps} with guard.nonfinite=skip lets one rank skip a step that the others make"
        yield UserError(what, job.where("comm.local_steps"), "guard.nonfinite=stop, or comm.local_steps=1")
    if config.log.noise_scale:
        what = f"log.noise_scale compares each rank's gradient with their mean, which comm.local_steps={steps} does not compute"
        yield UserError(what, job.where("comm.local_steps"), "comm.local_steps=1, or log.noise_scale=false")
    if config.norm.kind == "sync":
        what = f"norm.kind=sync synchronizes the ranks in every step, comm.local_steps={steps} does not"
        yield UserError(what, job.where("comm.local_steps"), "comm.local_steps=1, or norm.kind=ghost")


def reduce(job: PlannedJob) -> Iterator[UserError]:
    """comm.compression, comm.op=adasum and comm.local_steps each need a strategy of their own; comm.reduce names another."""
    comm = job.config.comm
    chosen = [f"comm.compression={comm.compression}"] * (comm.compression != "none")
    chosen += ["comm.op=adasum"] * (comm.op == "adasum")
    chosen += [f"comm.local_steps={comm.local_steps}"] * (comm.local_steps > 1)
    if len(chosen) > 1:
        yield UserError(f"{' and '.join(chosen)} exclude each other", job.where("comm.op"), "keep one of them")
    if chosen and comm.reduce in ("distributed_optimizer", "ddp"):
        yield UserError(f"comm.reduce={comm.reduce} does not support {chosen[0]}", job.where("comm.reduce"), "comm.reduce=auto")
    if comm.local_steps > 1 and comm.reduce == "bucket":
        what = f"comm.local_steps={comm.local_steps} reduces weights, not gradients: comm.reduce=bucket has nothing to do"
        yield UserError(what, job.where("comm.reduce"), "comm.reduce=auto")
    if comm.reduce == "distributed_optimizer" and "horovod_api" not in job.features:
        what = f"comm.reduce=distributed_optimizer needs the horovod engine; this is {job.engine}"
        yield UserError(what, job.where("comm.reduce"), "comm.engine=horovod, or comm.reduce=auto")
    if comm.reduce == "ddp" and "ddp" not in job.features:
        what = f"comm.reduce=ddp needs the torchdist engine; this is {job.engine}"
        yield UserError(what, job.where("comm.reduce"), "comm.engine=torchdist, or comm.reduce=auto")


def tune(job: PlannedJob) -> Iterator[UserError]:
    """comm.tune measures sizes of gradient buckets."""
    comm = job.config.comm
    without_buckets = [f"comm.local_steps={comm.local_steps}"] * (comm.local_steps > 1)
    without_buckets += ["comm.op=adasum"] * (comm.op == "adasum") + ["comm.reduce=ddp"] * (comm.reduce == "ddp")
    if comm.tune and without_buckets:
        what = f"comm.tune measures bucket sizes; {without_buckets[0]} has no buckets to tune"
        yield UserError(what, job.where("comm.tune"), "comm.tune=false")


def horovod_settings(job: PlannedJob) -> Iterator[UserError]:
    comm = job.config.comm
    chosen = {"hierarchical": comm.hierarchical, "cycle_ms": comm.cycle_ms is not None, "fusion_mb": comm.fusion_mb is not None}
    for name, is_set in chosen.items():
        if is_set and "horovod_api" not in job.features:
            what = f"comm.{name} is a setting of Horovod; this is the {job.engine} engine"
            yield UserError(what, job.where(f"comm.{name}"), f"leave comm.{name} out, or comm.engine=horovod")


def learning_rate(job: PlannedJob) -> Iterator[UserError]:
    """A class of torch.optim has an option lr; the recipe sets it."""
    if "lr" in job.config.optim.options:
        yield UserError("optim.lr is not an option: the recipe sets the rate of each step", job.where("optim.lr"), "optim.base_lr=...")


def noise_scale(job: PlannedJob) -> Iterator[UserError]:
    """log.noise_scale compares each rank's own gradient with the mean of all."""
    if not job.config.log.noise_scale:
        return
    if job.ranks == 1:
        what = "log.noise_scale compares each rank's gradient with their mean; the job has 1 rank"
        yield UserError(what, job.where("log.noise_scale"), "two ranks or more, or log.noise_scale=false")
    if job.config.comm.reduce == "ddp":  # a reduction may be under way when the gradient is read
        what = "log.noise_scale reads each rank's own gradients, which comm.reduce=ddp does not show"
        yield UserError(what, job.where("comm.reduce"), "comm.reduce=auto, or log.noise_scale=false")
    if job.config.speed.precision == "fp16":
        what = "log.noise_scale reads each rank's own gradients, which speed.precision=fp16 scales"
        yield UserError(what, job.where("speed.precision"), "speed.precision=bf16, or log.noise_scale=false")


def reading_ahead(job: PlannedJob) -> Iterator[UserError]:
    if job.config.data.ahead == 0 and job.config.data.readers:
        what = f"data.readers={job.config.data.readers} threads read steps ahead, and data.ahead=0 reads none ahead"
        yield UserError(what, job.where("data.readers"), "data.ahead=2, or leave data.readers out")


def crop(job: PlannedJob) -> Iterator[UserError]:
    augment = job.config.augment
    if augment.crop and augment.resized_crop:
        what = f"augment.crop={augment.crop} and augment.resized_crop={augment.resized_crop:g} both crop the image"
        yield UserError(what, job.where("augment.crop"), "keep one of them")


def recipe(job: PlannedJob) -> Iterator[UserError]:
    yield from recipe_conflicts(job.config)


def targets(job: PlannedJob) -> Iterator[UserError]:
    for target in job.config.log.targets:
        if not 0 <= target <= 1:
            yield UserError(f"log.targets has {target:g}: accuracies are 0 to 1", job.where("log.targets"), "log.targets=[0.9] for 90 %")


RULES: tuple[Rule, ...] = (  # those that depend on the number of ranks alone come last: plan then has one message for all its rows
    framework,
    recipe,
    reduce,
    compression,
    adasum,
    local_steps,
    tune,
    horovod_settings,
    learning_rate,
    noise_scale,
    reading_ahead,
    crop,
    targets,
    single_process,
    batch_size,
)

# What framework=jax and framework=numpy support of options that framework=torch has whole: key -> values, the default first.
_NOT_TORCH: dict[str, tuple[Any, ...]] = {
    "speed.precision": ("fp32", "fp64", "auto"),
    "speed.compile": ("none",),
    "speed.channels_last": (None,),
    "data.resident": (None, False),
    "comm.compression": ("none",),
    "comm.op": ("mean",),
    "comm.local_steps": (1,),
    "comm.tune": (False,),
    "comm.reduce": ("auto",),
    "norm.kind": ("batch",),
    "model.classifier_std": (None,),
}
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "jax": _NOT_TORCH,
    "numpy": _NOT_TORCH
    | {"model.name": ("linear",), "speed.device": ("auto", "cpu"), "log.noise_scale": (False,), "profile.steps": (None,)},
}


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _as_yaml(value: Any) -> str:
    """As a user writes it: true, null."""
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else f"{value}"

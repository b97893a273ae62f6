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
from hvdtrain.config.duration import parse_duration
from hvdtrain.config.given import class_of, is_object
from hvdtrain.config.length import read_length
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config, ParallelConfig, ServersConfig
from hvdtrain.errors import UserError
from hvdtrain.frameworks.build_rule import build_rule
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.recipe.conflicts import recipe_conflicts
from hvdtrain.training.build import engine_of
from hvdtrain.training.telemetry.profiler import parse_profile_steps
from hvdtrain.training.telemetry.update_log import MOST_STALE


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
    """Does refuse_conflicts() before the engine starts, where this process knows the number of ranks and the whole configuration.

    It does not without a launcher that is known, nor with resume=RUN, whose configuration rank 0 alone reads.
    """
    if place.launcher != NO_LAUNCHER.launcher and config.resume in ("auto", "no"):
        engine = engine_of(config, place).engine
        refuse_conflicts(resolve_batch_size(config, place.size), engine, place.size)


def refuse_on_every_engine(config: Config, ranks: int) -> None:
    """Does refuse_conflicts() where the launcher is not known: raises UserError where no engine that comm.engine allows fits."""
    errors = []
    for engine in possible_engines(config.comm.engine, ranks):
        try:
            refuse_conflicts(config, engine, ranks)
        except UserError as error:
            errors.append(error)
        else:
            return
    texts = [str(error) for error in errors]
    raise max(errors, key=lambda error: texts.count(str(error)))  # the reason that most engines have, or the first engine's


def _check_single_options(config: Config) -> None:
    """Raises UserError for values that make no sense by themselves and that the schema's types and bounds let through."""
    for key, time in {"guard.max_time": config.guard.max_time, "stop.time": config.stop.time}.items():
        if time is not None:
            parse_duration(time, config.where(key))
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
    """Every rank needs a sample of every step; those that have a model together read the same ones."""
    readers = max(1, job.config.readers(job.ranks))
    smallest = {"batch.size": job.config.batch.size, "recipe.grow_to": min(job.config.recipe.grow_to, default=readers)}
    for key, samples in smallest.items():
        if samples < readers:
            what = f"batch {samples} does not split over {readers} ranks: some would have no sample"
            yield UserError(what, job.where(key), f"{readers} or more, or fewer ranks")


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
        if read_length(config.comm.local_from).amount:
            what = (
                f"comm.local_from={config.comm.local_from} is where comm.local_steps begins, and comm.local_steps=1 reduces every gradient"
            )
            yield UserError(what, job.where("comm.local_from"), "comm.local_steps=4, say, or leave comm.local_from out")
        return
    for section in (config.log, config.checkpoint, config.evaluate):
        key, every = f"{section.section}.every_steps", section.every_steps
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
    if comm.local_steps > 1 and comm.reduce == "bucket" and not read_length(comm.local_from).amount:
        what = f"comm.local_steps={comm.local_steps} reduces weights, not gradients: comm.reduce=bucket has nothing to do"
        yield UserError(what, job.where("comm.reduce"), "comm.reduce=auto")
    if comm.reduce == "distributed_optimizer" and "horovod_api" not in job.features:
        what = f"comm.reduce=distributed_optimizer needs the horovod engine; this is {job.engine}"
        yield UserError(what, job.where("comm.reduce"), "comm.engine=horovod, or comm.reduce=auto")
    if comm.reduce == "ddp" and "ddp" not in job.features:
        what = f"comm.reduce=ddp needs the torchdist engine; this is {job.engine}"
        yield UserError(what, job.where("comm.reduce"), "comm.engine=torchdist, or comm.reduce=auto")


def shards(job: PlannedJob) -> Iterator[UserError]:
    """shard.stage reduces gradients in its own way, to the rank that updates them."""
    shard, comm, speed = job.config.shard, job.config.comm, job.config.speed
    options = {"group": shard.group != "all", "reshard": not shard.reshard, "offload": shard.offload != "none"}
    least = {"group": 1, "reshard": 3, "offload": 3 if shard.offload == "parameters" else 1}
    for name, is_set in options.items():
        if is_set and shard.stage < least[name]:
            what = f"shard.{name}={_as_yaml(getattr(shard, name))} is of shard.stage={least[name]}{' or more' * (least[name] < 3)}"
            yield UserError(f"{what}; this is {shard.stage}", job.where(f"shard.{name}"), f"shard.stage={least[name]}")
    if not shard.stage:
        return
    others = {
        "comm.op": comm.op == "adasum",
        "comm.local_steps": comm.local_steps > 1,
        "comm.compression": comm.compression != "none",
        "comm.reduce": comm.reduce in ("ddp", "distributed_optimizer") or (shard.stage == 3 and comm.reduce == "bucket"),
        "comm.tune": comm.tune,
    }
    others |= {"speed.compile": speed.compile != "none", "speed.channels_last": bool(speed.channels_last)} if shard.stage == 3 else {}
    for key, is_set in others.items():
        if is_set:
            what = f"shard.stage={shard.stage} does not support {key}={_as_yaml(_value(job.config, key))}"
            yield UserError(what, job.where(key), f"leave {key} out, or shard.stage=0")
    if shard.stage == 3 and "horovod_api" in job.features:
        what = f"shard.stage=3 runs on torch's process groups, which the {job.engine} engine does not make"
        yield UserError(what, job.where("comm.engine"), "comm.engine=mpi with the same mpirun, or shard.stage=2")
    if job.config.log.noise_scale and shard.stage > 1:
        yield from _own_gradients(job)


def _own_gradients(job: PlannedJob) -> Iterator[UserError]:
    """Conflicts of stages 2 and 3, whose ranks do not keep their own gradients."""
    batch, stage = job.config.batch, job.config.shard.stage
    several = batch.micro == "auto" or (isinstance(batch.micro, int) and -(-batch.size // job.ranks) > batch.micro)
    if stage == 3 or several or job.config.recipe.growth != "none":
        when = "" if stage == 3 else " of several micro-batches"
        what = f"log.noise_scale reads each rank's own gradients{when}, which shard.stage={stage} does not keep"
        yield UserError(what, job.where("log.noise_scale"), "shard.stage=1, or log.noise_scale=false")


def parallel(job: PlannedJob) -> Iterator[UserError]:
    """parallel.tensor and parallel.pipeline give ranks parts of one model."""
    config, ranks = job.config, job.config.parallel.ranks
    if config.parallel.sequence and config.parallel.tensor == 1:
        what = "parallel.sequence=true divides positions over the ranks of a tensor group; this is parallel.tensor=1"
        yield UserError(what, job.where("parallel.sequence"), "parallel.tensor=2, or parallel.sequence=false")
    if ranks == 1:
        return
    without = "parallel.tensor" if config.parallel.tensor > 1 else "parallel.pipeline"
    if job.ranks % ranks:
        what = f"{config.parallel.summary()} does not divide the {job.ranks} ranks of the job"
        yield UserError(what, job.where(without), f"a multiple of {ranks} ranks, or another {without}")
    others = {
        "comm.op": config.comm.op == "adasum",
        "comm.local_steps": config.comm.local_steps > 1,
        "comm.reduce": config.comm.reduce in ("ddp", "distributed_optimizer"),
        "comm.tune": config.comm.tune,
        "comm.hierarchical": config.comm.hierarchical,
        "shard.group": config.shard.group != "all",
        "shard.offload": config.shard.offload != "none",
        "norm.kind": config.norm.kind == "sync",
        "log.noise_scale": config.log.noise_scale,
        "speed.compile": config.speed.compile != "none",
        "batch.micro": config.batch.micro == "auto",
    }
    for key, is_set in others.items():
        if is_set:
            what = f"{config.parallel.summary()} does not support {key}={_as_yaml(_value(config, key))}"
            one = [f"{name}=1" for name in ("parallel.tensor", "parallel.pipeline") if _value(config, name) > 1]
            yield UserError(what, job.where(key), f"leave {key} out, or {' '.join(one)}")


def pipeline(job: PlannedJob) -> Iterator[UserError]:
    """parallel.pipeline gives ranks layers of one model, one after the other."""
    config, parallel = job.config, job.config.parallel
    if parallel.pipeline == 1:
        for name in ("schedule", "virtual", "micro_batches", "balance"):
            if getattr(parallel, name) != ParallelConfig.model_fields[name].default:
                what = f"parallel.{name}={getattr(parallel, name)} is of a pipeline; this is parallel.pipeline=1"
                yield UserError(what, job.where(f"parallel.{name}"), f"parallel.pipeline=2, or leave parallel.{name} out")
        return
    if "p2p" not in job.features:
        what = f"parallel.pipeline={parallel.pipeline} sends from one rank to another, which the {job.engine} engine does not"
        yield UserError(what, job.where("comm.engine"), "comm.engine=mpi with the same mpirun, or comm.engine=torchdist")
    if parallel.schedule == "interleaved" and parallel.virtual == 1:
        what = "parallel.schedule=interleaved with parallel.virtual=1 has one stage on each rank, which is 1f1b"
        yield UserError(what, job.where("parallel.virtual"), "parallel.virtual=2, or parallel.schedule=1f1b")
    if parallel.schedule != "interleaved" and parallel.stages_of_rank > 1:
        what = f"parallel.schedule={parallel.schedule} has one stage on each rank, parallel.virtual={parallel.virtual} wants more"
        yield UserError(what, job.where("parallel.virtual"), "parallel.schedule=interleaved, or leave parallel.virtual out")
    stages = parallel.pipeline * parallel.stages_of_rank
    if isinstance(parallel.balance, list) and len(parallel.balance) != stages:
        given = len(parallel.balance)
        what = f"parallel.balance={_as_yaml(parallel.balance)} has {given} stage{'s' * (given != 1)}, the pipeline has {stages}"
        yield UserError(what, job.where("parallel.balance"), f"{stages} numbers of units: hvdtrain plan --pipeline shows them")
    if parallel.schedule == "zero_bubble" and config.model.recompute != "none":
        what = (
            f"zero_bubble goes back through each stage twice, and would compute its blocks twice: model.recompute={config.model.recompute}"
        )
        yield UserError(what, job.where("model.recompute"), "parallel.schedule=1f1b, or model.recompute=none")
    if config.batch.micro is not None and parallel.micro_batches:
        both = f"parallel.micro_batches={parallel.micro_batches} and batch.micro={config.batch.micro}"
        what = f"{both} both say how many micro-batches a step has"
        yield UserError(what, job.where("batch.micro"), "leave one of them out")
    others = {"shard.stage": config.shard.stage == 3, "log.samples": config.log.samples > 0}
    for key, is_set in others.items():
        if is_set:
            what = f"parallel.pipeline={parallel.pipeline} does not support {key}={_value(config, key)}: no rank has the whole model"
            fix = "shard.stage=1 or 2" if key == "shard.stage" else "log.samples=0, and draw from its checkpoints: hvdtrain sample RUN"
            yield UserError(what, job.where(key), f"{fix}; or parallel.pipeline=1")


def dense(job: PlannedJob) -> Iterator[UserError]:
    """parallel.dense gives each rank a part of the dense layers, and the owner's part of all other training state (ZeRO stage 1 or 2)."""
    config, chosen = job.config, f"parallel.dense={job.config.parallel.dense}"
    if config.parallel.dense == "none":
        if config.parallel.dense_updates > 1:
            what = f"parallel.dense_updates={config.parallel.dense_updates} is of a dense part; this is parallel.dense=none"
            yield UserError(what, job.where("parallel.dense_updates"), "parallel.dense=c, also on one rank; or leave it out")
        return
    if config.parallel.ranks > 1:
        what = f"{chosen} and {config.parallel.summary()} both divide layers: parallel.dense over all ranks"
        yield UserError(what, job.where("parallel.dense"), "keep one of them")
    if config.shard.stage == 3:
        what = f"{chosen} keeps whole convolutions on every rank, which shard.stage=3 cuts"
        yield UserError(what, job.where("shard.stage"), "shard.stage=2, or parallel.dense=none")
    others = {
        "comm.op": config.comm.op == "adasum",
        "comm.local_steps": config.comm.local_steps > 1,
        "comm.compression": config.comm.compression != "none",
        "comm.reduce": config.comm.reduce in ("ddp", "distributed_optimizer", "bucket"),
        "comm.tune": config.comm.tune,
        "shard.group": config.shard.group != "all",
        "shard.offload": config.shard.offload != "none",
        "norm.kind": config.norm.kind == "sync",
        "model.recompute": config.model.recompute != "none",
        "log.noise_scale": config.log.noise_scale,
        "speed.compile": config.speed.compile != "none",
    }
    for key, is_set in others.items():
        if is_set:
            what = f"{chosen} does not support {key}={_as_yaml(_value(config, key))}"
            yield UserError(what, job.where(key), f"leave {key} out, or parallel.dense=none")
    if config.parallel.dense_updates > 1:
        yield from _dense_updates(job)


def _dense_updates(job: PlannedJob) -> Iterator[UserError]:
    """A step whose turns each update the dense part has each sample in one turn, which its place in the global batch says."""
    config, chosen, key = job.config, f"parallel.dense_updates={job.config.parallel.dense_updates}", "parallel.dense_updates"
    if config.parallel.dense == "a":
        yield UserError(f"{chosen} needs turns; parallel.dense=a has all samples in one", job.where(key), "parallel.dense=c or b")
    if config.batch.size < config.parallel.dense_updates:
        what = f"batch {config.batch.size} does not split into the turns of {chosen}: some would have no sample"
        yield UserError(what, job.where(key), f"parallel.dense_updates={config.batch.size} or fewer")
    if is_dotted(config.optim.name):
        what = f"{chosen} updates some of the parameters by themselves; whether {config.optim.name} counts its steps right is not known"
        yield UserError(what, job.where("optim.name"), "an optimizer of hvdtrain's own: sgd, adam, lars ...; or parallel.dense_updates=1")
    others = {
        "batch.micro": config.batch.micro is not None,
        "recipe.growth": config.recipe.growth != "none",  # by micro-batches
        "recipe.gradient_noise": config.recipe.gradient_noise > 0,
        "data.sampling": config.data.sampling != "global",
    }
    for name, is_set in others.items():
        if is_set:
            what = f"{chosen} does not support {name}={_as_yaml(_value(config, name))}"
            yield UserError(what, job.where(name), f"leave {name} out, or parallel.dense_updates=1")


def whole_matrices(job: PlannedJob) -> Iterator[UserError]:
    """optim.name=muon makes whole matrices orthogonal; where each rank has a part of one, shard.stage of framework=torch alone does it."""
    config = job.config
    if config.optim.name != "muon":
        return
    others = {
        "shard.stage": config.shard.stage > 0 and config.framework == "jax",
        "parallel.tensor": config.parallel.tensor > 1,
        "parallel.pipeline": config.parallel.pipeline > 1,
        "parallel.dense": config.parallel.dense != "none",
        "servers.count": config.servers.count > 0,
    }
    for key, is_set in others.items():
        if is_set:
            what = f"optim.name=muon does not support {key}={_as_yaml(_value(config, key))}{' in JAX' * (key == 'shard.stage')}"
            yield UserError(what, job.where(key), f"leave {key} out, or optim.name=adamw")
    if config.optim.options.get("bf16") and config.framework == "numpy":
        yield UserError("numpy has no bfloat16", job.where("optim.bf16"), "leave optim.bf16 out, or framework=torch")


def servers(job: PlannedJob) -> Iterator[UserError]:
    """servers.count gives the weights to some ranks, and the samples to the others."""
    config, servers = job.config, job.config.servers
    if not servers.count:
        defaults = ServersConfig()
        for name in ("bound", "correct", "compensation", "log"):
            is_set = getattr(servers, name) != getattr(defaults, name)
            if is_set and config.resume in ("auto", "no"):  # else the run's config.yaml may have it, which goes on without servers
                what = f"servers.{name}={_as_yaml(getattr(servers, name))} is of parameter servers; this is servers.count=0"
                yield UserError(what, job.where(f"servers.{name}"), f"servers.count=1, or leave servers.{name} out")
        return
    if "p2p" not in job.features and "several_ranks" in job.features:
        what = f"servers.count={servers.count} sends from one rank to another, which the {job.engine} engine does not"
        yield UserError(what, job.where("comm.engine"), "comm.engine=mpi with the same mpirun, or comm.engine=torchdist")
    if servers.count >= job.ranks:
        what = f"servers.count={servers.count} leaves no worker: the job has {job.ranks} rank{'s' * (job.ranks > 1)}"
        yield UserError(what, job.where("servers.count"), f"{servers.count + 1} ranks or more, or fewer servers")
    if is_dotted(config.optim.name):
        what = (
            f"servers.count={servers.count} does not support optim.name={config.optim.name}: servers apply rules to ranges of the weights"
        )
        yield UserError(what, job.where("optim.name"), "optim.name=sgd, adamw or another rule of hvdtrain")
    others = {
        "shard.stage": config.shard.stage > 0,
        "parallel.tensor": config.parallel.tensor > 1,
        "parallel.pipeline": config.parallel.pipeline > 1,
        "parallel.dense": config.parallel.dense != "none",
        "comm.local_steps": config.comm.local_steps > 1,
        "comm.op": config.comm.op == "adasum",
        "comm.reduce": config.comm.reduce != "auto",
        "comm.compression": config.comm.compression != "none",
        "comm.tune": config.comm.tune,
        "norm.kind": config.norm.kind == "sync",
        "speed.precision": config.speed.precision == "fp16",
        "speed.compile": config.speed.compile != "none",
        "batch.micro": config.batch.micro == "auto",
        "log.noise_scale": config.log.noise_scale,
        "log.step_times": config.log.step_times,
    }
    for key, is_set in others.items():
        if is_set:
            what = f"servers.count={servers.count} does not support {key}={_as_yaml(_value(config, key))}"
            yield UserError(what, job.where(key), f"leave {key} out, or servers.count=0")
    yield from _synchronous_servers(job)
    yield from _update_log(job)


def _update_log(job: PlannedJob) -> Iterator[UserError]:
    """Conflicts of servers.log, whose records have 16 bits for the staleness, and no other changes of the weights than updates."""
    config = job.config
    if config.servers.log and config.log.every_steps > MOST_STALE:
        what = f"servers.log needs a sync point every {MOST_STALE} steps or less, this is log.every_steps={config.log.every_steps}"
        yield UserError(what, job.where("log.every_steps"), f"log.every_steps={MOST_STALE}")
    if config.servers.log and config.guard.nonfinite == "rollback":
        what = "servers.log has updates alone, and guard.nonfinite=rollback puts older weights in their place"
        yield UserError(what, job.where("guard.nonfinite"), "guard.nonfinite=skip or stop, or servers.log=false")


def _synchronous_servers(job: PlannedJob) -> Iterator[UserError]:
    """Conflicts of servers.bound=0: no gradient is older than the weights, and the order of updates is that of the steps."""
    servers = job.config.servers
    chosen = {"correct": servers.correct != "none", "log": servers.log}
    for name, is_set in chosen.items():
        if is_set and not servers.are_asynchronous:
            what = f"servers.{name}={_as_yaml(getattr(servers, name))} is of asynchronous updates; with servers.bound=0 there are none"
            yield UserError(what, job.where(f"servers.{name}"), f"servers.bound=4 or none, or leave servers.{name} out")


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


def device_memory(job: PlannedJob) -> Iterator[UserError]:
    """comm.device_memory is of collectives of MPI, where a rank computes on a GPU."""
    wish, key = job.config.comm.device_memory, "comm.device_memory"
    if wish == "auto":
        return
    if "plain_mpi" not in job.features:
        what = f"{key}={wish} is of the mpi engine; this is the {job.engine} engine"
        yield UserError(what, job.where(key), f"leave {key} out, or comm.engine=mpi")
    if job.config.speed.device == "cpu":
        yield UserError(f"{key}={wish} is of tensors on GPUs; this is speed.device=cpu", job.where(key), f"leave {key} out")


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


def samples(job: PlannedJob) -> Iterator[UserError]:
    """log.samples shows what a language model draws."""
    config, key = job.config, "log.samples"
    if not config.log.samples:
        return
    if config.task.name != "language":
        what = f"log.samples={config.log.samples} draws tokens; the job has task.name={config.task.name}"
        yield UserError(what, job.where(key), "task.name=language, or leave it out")
    elif config.data.name not in ("image_tokens", "text"):
        what = f"log.samples={config.log.samples} draws images or text; what tokens of data.name={config.data.name} show is not known"
        yield UserError(what, job.where(key), "data.name=image_tokens or text, or leave it out")


def reading_ahead(job: PlannedJob) -> Iterator[UserError]:
    if job.config.data.ahead == 0 and job.config.data.readers:
        what = f"data.readers={job.config.data.readers} threads read steps ahead, and data.ahead=0 reads none ahead"
        yield UserError(what, job.where("data.readers"), "data.ahead=2, or leave data.readers out")


def crop(job: PlannedJob) -> Iterator[UserError]:
    augment = job.config.augment
    if augment.crop and augment.resized_crop:
        what = f"augment.crop={augment.crop} and augment.resized_crop={augment.resized_crop:g} both crop the image"
        yield UserError(what, job.where("augment.crop"), "keep one of them")
    if augment.pad != "zeros" and not augment.crop:
        what = f"augment.pad={augment.pad} is what augment.crop pads with, and there is no augment.crop"
        yield UserError(what, job.where("augment.pad"), "augment.crop=2, or leave augment.pad out")


def groups(job: PlannedJob) -> Iterator[UserError]:
    """optim.groups is done by the rules of hvdtrain/optim; check_patterns() judges the names, once the model is known."""
    config = job.config
    if config.optim.groups and is_dotted(config.optim.name):
        what = f"optim.groups is of hvdtrain's own optimizers; {config.optim.name} has one rate for all parameters"
        yield UserError(what, job.where("optim.groups"), "a name of `list` for optim.name, or leave optim.groups out")


def ema(job: PlannedJob) -> Iterator[UserError]:
    """optim.ema is a part of the optimizer's state, whose parts an evaluation puts together."""
    config = job.config
    if config.optim.ema is None:
        return
    where = job.where("optim.ema")
    if is_dotted(config.optim.name):
        what = f"optim.ema is of hvdtrain's own optimizers, and optim.name={config.optim.name} has its state to itself"
        yield UserError(what, where, "a name of `list` for optim.name, or leave optim.ema out")
    used = {
        "shard.stage=3": config.shard.stage == 3,
        "servers.count": config.servers.count,
        "parallel.tensor": config.parallel.tensor > 1,
        "parallel.pipeline": config.parallel.pipeline > 1,
        "parallel.dense": config.parallel.dense != "none",
    }
    for key in (key for key, is_used in used.items() if is_used):
        what = f"optim.ema does not go with {key}: no rank has all averages to evaluate with"
        yield UserError(what, where, f"leave {key} or optim.ema out" + ("; shard.stage=2 has them" if "3" in key else ""))


def views(job: PlannedJob) -> Iterator[UserError]:
    """evaluate.views averages what the model says of an image."""
    config, count = job.config, job.config.evaluate.views
    if count == 1:
        return
    if config.task.name != "classification":
        what = f"evaluate.views={count} is of images of classes; the job has task.name={config.task.name}"
        yield UserError(what, job.where("evaluate.views"), "task.name=classification, or leave it out")
    if config.parallel.pipeline > 1:
        what = f"evaluate.views={count} averages the outputs of several passes, which a pipeline does not keep"
        yield UserError(what, job.where("evaluate.views"), "evaluate.views=1, and `evaluate RUN evaluate.views=6` afterwards")


def recompute(job: PlannedJob) -> Iterator[UserError]:
    """model.recompute makes forward passes of blocks inside of the backward pass."""
    config, which = job.config, job.config.model.recompute
    if which != "none" and config.norm.kind == "sync":
        what = f"model.recompute={which} computes norms again, and with norm.kind=sync each time on all ranks"
        yield UserError(what, job.where("model.recompute"), "norm.kind=batch or ghost, or model.recompute=none")
    if which != "none" and config.speed.compile != "none":
        what = f"speed.compile={config.speed.compile} chooses itself what the backward pass computes again, model.recompute={which} too"
        yield UserError(what, job.where("model.recompute"), "model.recompute=none, or speed.compile=none")


def lost(job: PlannedJob) -> Iterator[UserError]:
    """guard.lost=shrink needs a state that the living ranks have, and a step that is the same on fewer ranks."""
    config = job.config
    if config.guard.lost != "stop" and config.servers.count and job.engine != "mpi":
        what = f"guard.lost={config.guard.lost} does not go on with servers.count={config.servers.count} on the {job.engine} engine"
        yield UserError(what, job.where("guard.lost"), "comm.engine=mpi (mpirun --with-ft ulfm), or guard.lost=stop")
    if config.guard.lost != "shrink":
        return
    chosen = {
        "parallel.tensor": config.parallel.tensor > 1,
        "parallel.pipeline": config.parallel.pipeline > 1,
        "parallel.dense": config.parallel.dense != "none",
        "shard.stage": config.shard.stage == 3,
        "shard.group": config.shard.stage in (1, 2) and config.shard.group == "node",
        "comm.reduce": config.comm.reduce == "ddp",
        "comm.local_steps": config.comm.local_steps > 1,
    }
    for key, is_set in chosen.items():
        if is_set:
            what = f"guard.lost=shrink does not go on with {key}={_as_yaml(_value(config, key))} on fewer ranks"
            instead = {"shard.stage": "shard.stage=2", "shard.group": "shard.group=all"}.get(key, f"without {key}")
            yield UserError(what, job.where("guard.lost"), f"guard.lost=restart, or {instead}")
    if config.framework == "jax":
        what = "guard.lost=shrink does not go on with framework=jax, whose step is compiled for a number of ranks"
        yield UserError(what, job.where("guard.lost"), "guard.lost=restart, or framework=torch")


def micro(job: PlannedJob) -> Iterator[UserError]:
    if job.config.batch.micro == "auto" and job.config.framework != "torch":
        what = f"batch.micro=auto needs a prediction of the memory, which framework={job.config.framework} does not have"
        yield UserError(what, job.where("batch.micro"), "batch.micro=N, or framework=torch")
    if job.config.norm.kind == "sync" and job.config.batch.micro is not None:
        yield from _passes_of_sync_norm(job)


def _passes_of_sync_norm(job: PlannedJob) -> Iterator[UserError]:
    """A synchronized norm is over the samples of all ranks in a pass; of a rank's share in several passes they depend on the ranks."""
    config, micro = job.config, job.config.batch.micro
    largest = max(config.batch.size, *config.recipe.grow_to, config.recipe.batch_max or 0)
    share = -(-largest // max(1, config.readers(job.ranks)))
    if isinstance(micro, int) and share <= micro and config.data.sampling == "global":
        return
    what = f"batch.micro={micro} makes the passes of a step, over each of which norm.kind=sync normalizes, depend on the number of ranks"
    fix = "leave batch.micro out: a batch that grows has the same passes on any number of ranks; or norm.kind=batch or ghost"
    yield UserError(what, job.where("batch.micro"), fix)


def recipe(job: PlannedJob) -> Iterator[UserError]:
    yield from recipe_conflicts(job.config)


def task(job: PlannedJob) -> Iterator[UserError]:
    """model.loss and model.label_smoothing are of classes; the next token is one too."""
    name, model = job.config.task.name, job.config.model
    if name in ("regression", "language") and model.loss != "cross_entropy":
        fix = "task.loss=squared_error, which is its default" if name == "regression" else "leave it out"
        yield UserError(f"model.loss={model.loss} is of task.name=classification, this is {name}", job.where("model.loss"), fix)
    if name == "regression" and model.label_smoothing:
        what = f"model.label_smoothing={model.label_smoothing:g} spreads the label of a class, which task.name=regression does not have"
        yield UserError(what, job.where("model.label_smoothing"), "leave it out")


def ignored_label(job: PlannedJob) -> Iterator[UserError]:
    """task.ignore_label names samples without a class, each of which is alone."""
    config, where = job.config, job.where("task.ignore_label")
    if config.task.options.get("ignore_label") is None:
        return
    if config.augment.mixup and config.task.name == "classification":
        what = "augment.mixup mixes each sample with any other, and task.ignore_label leaves some without a class to mix"
        yield UserError(what, where, "augment.mixup=0, or leave task.ignore_label out")
    if is_object(config.task.name):
        what = f"task.ignore_label is of task.name=classification; this job has the loss {class_of(config.task.name)}"
        yield UserError(what, where, "CrossEntropyLoss(ignore_index=N), or leave loss= of hvdtrain.train() out")


def targets(job: PlannedJob) -> Iterator[UserError]:
    if job.config.task.name != "classification":
        return
    for target in job.config.log.targets:
        if not 0 <= target <= 1:
            yield UserError(f"log.targets has {target:g}: accuracies are 0 to 1", job.where("log.targets"), "log.targets=[0.9] for 90 %")
    stop = job.config.stop.target
    if stop is not None and not 0 <= stop <= 1:
        yield UserError(f"stop.target is {stop:g}: accuracy is 0 to 1", job.where("stop.target"), "stop.target=0.9 for 90 %")


RULES: tuple[Rule, ...] = (  # those that depend on the number of ranks alone come last: plan then has one message for all its rows
    framework,
    recipe,
    reduce,
    compression,
    adasum,
    local_steps,
    shards,
    parallel,
    dense,
    pipeline,
    whole_matrices,
    servers,
    tune,
    horovod_settings,
    device_memory,
    learning_rate,
    noise_scale,
    samples,
    reading_ahead,
    crop,
    ema,
    views,
    groups,
    recompute,
    lost,
    micro,
    task,
    ignored_label,
    targets,
    single_process,
    batch_size,
)

# What framework=jax and framework=numpy support of options that framework=torch has whole: key -> values, that of a fix first.
_NOT_TORCH: dict[str, tuple[Any, ...]] = {
    "speed.precision": ("fp32", "fp64", "auto"),
    "speed.compile": ("none",),
    "speed.channels_last": (None,),
    "speed.deterministic": (False,),
    "data.resident": (None, False),
    "comm.compression": ("none",),
    "comm.device_memory": ("auto",),
    "comm.op": ("mean",),
    "comm.local_steps": (1,),
    "comm.tune": (False,),
    "comm.reduce": ("auto",),
    "parallel.tensor": (1,),
    "parallel.sequence": (False,),
    "parallel.dense": ("none",),
    "parallel.dense_updates": (1,),
    "parallel.pipeline": (1,),
    "servers.count": (0,),
    "shard.stage": (0,),
    "shard.group": ("all",),
    "shard.offload": ("none",),
    "norm.kind": ("batch",),
    "model.classifier_std": (None,),
    "log.samples": (0,),
}
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "jax": _NOT_TORCH | {"shard.stage": (2, 1, 0)},
    "numpy": _NOT_TORCH
    | {
        "model.name": ("linear",),
        "model.recompute": ("none",),
        "speed.device": ("auto", "cpu"),
        "log.noise_scale": (False,),
        "profile.steps": (None,),
    },
}


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _as_yaml(value: Any) -> str:
    """A value as a user writes it: true, null."""
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else f"{value}"

"""servers.count: some ranks hold and update the weights, the others read the samples."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import MOST_STALE
from hvdtrain.errors import UserError
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.features import frameworks, optim
from hvdtrain.features.comm import not_on_horovod
from hvdtrain.features.job_feature import Conflict, JobFeature, PlannedJob, needs_engine
from hvdtrain.features.of_extras import Added, AddedRows


def _leaves_a_worker(job: PlannedJob) -> Iterator[UserError]:
    count = ServersConfig.of(job.config).count
    if count >= job.ranks:
        what = (
            f"servers.count={count} leaves no worker: the job has {job.ranks} "
            f"rank{'s' if job.ranks > 1 else ''}"
        )
        yield UserError(
            what, job.where("servers.count"), f"{count + 1} ranks or more, or fewer servers"
        )


def _is_new_without(config: Config) -> bool:
    """Whether the job has no servers and does not resume another run, which may have them."""
    return not ServersConfig.of(config).count and config.resume in ("auto", "no")


def _is_synchronous(config: Config) -> bool:
    """Whether no gradient is older than the weights, so that updates have the order of the
    steps."""
    return not ServersConfig.of(config).is_asynchronous


def _has_log(config: Config) -> bool:
    return ServersConfig.of(config).log


def _of_asynchronous(key: str, values: Values) -> Exclusion:
    return Exclusion(
        key,
        values,
        what="{set} needs asynchronous updates, which servers.bound=0 disables",
        fix="servers.bound=4 or none, or leave {key} out",
        when=_is_synchronous,
        words="servers.bound=0",
        why="with servers.bound=0 no gradient is older than the weights",
    )


def _summary(servers: ServersConfig, ranks: int) -> str:
    """Describes the roles: rank 0; the others are workers, whose gradients are at most 4 updates
    old when they are applied."""
    first = "rank 0" if servers.count == 1 else f"ranks 0 to {servers.count - 1}"
    if not servers.is_asynchronous:
        return (
            f"{first}; every update waits for a gradient of each of the {ranks - servers.count} "
            "workers"
        )
    bound = "of any age" if servers.bound == "none" else f"at most {servers.bound} updates old"
    return (
        f"{first}; the gradients of the {ranks - servers.count} workers are {bound} when they are "
        "applied"
    )


SERVERS = JobFeature(
    key="servers.count",
    on=lambda config: ServersConfig.of(config).count > 0,
    updates_whole_weights=False,
    has_common_steps=False,
    reader="worker",
    own_loop="hvdtrain.train(), with an optimizer of hvdtrain's: a worker makes no step, which "
    "brings the state of one of torch's",
    arrangement="hvdtrain.extras.servers.arrangement:Servers",
    gauge="hvdtrain.extras.servers.update_log:staleness_gauge",
    examples=(
        *(
            "servers.count=1",
            "servers.count=1 servers.bound=1",
            "servers.count=1 servers.bound=1 servers.correct=scale",
        ),
        "servers.count=1 servers.bound=1 servers.log=true",
    ),
    off="servers.count=0",
    why="servers hold the weights, and workers read the samples",
    without=options(
        "servers.count",
        {
            "servers.bound": 4,
            "servers.correct": "scale",
            "servers.compensation": 0.1,
            "servers.log": True,
        },
        fix="servers.count=1",
        when=_is_new_without,
    ),
    first=(_leaves_a_worker,),
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="{chosen} does not support {set}: servers apply rules to ranges of the weights",
            fix="optim.name=sgd, adamw or another rule of hvdtrain",
            why="servers apply rules to ranges of the weights",
        ),
        Exclusion(
            "shard.stage",
            above(0),
            why="servers already shard the weights and the optimizer's state",
        ),
        Exclusion("parallel.tensor", above(1)),
        Exclusion("parallel.pipeline", above(1)),
        Exclusion("parallel.dense", other_than("none", "a")),
        Exclusion("comm.local_steps", above(1), why="only servers have weights"),
        Exclusion("comm.op", among("adasum"), why="gradients are not reduced over ranks"),
        Exclusion(
            "comm.reduce", other_than("auto", "bucket"), why="gradients are not reduced over ranks"
        ),
        Exclusion(
            "comm.compression",
            other_than("none", "fp16"),
            why="gradients are not reduced over ranks",
        ),
        Exclusion("comm.tune", among(True), why="gradients are not reduced over ranks"),
        Exclusion("norm.kind", among("sync"), why="workers do not wait for each other"),
        Exclusion(
            "speed.precision", among("fp16"), why="each worker would have its own loss scale"
        ),
        Exclusion(
            "batch.micro", among("auto"), why="the memory of servers and workers is not predicted"
        ),
        Exclusion("log.noise_scale", among(True), why="there is no mean of the ranks' gradients"),
        Exclusion("log.step_times", among(True), why="ranks do not take a step together"),
        _of_asynchronous("servers.correct", other_than("none", "scale")),
        _of_asynchronous("servers.log", among(True)),
        Exclusion(
            "log.every_steps",
            above(MOST_STALE),
            what=f"servers.log needs a sync point every {MOST_STALE} steps or less, but this is "
            f"{{set}}",
            fix=f"log.every_steps={MOST_STALE}",
            when=_has_log,
            words="servers.log=true servers.bound=4",
            why="a record of the log has 16 bits for the staleness",
        ),
        Exclusion(
            "guard.nonfinite",
            among("rollback"),
            what="servers.log records only updates, but {set} restores older weights",
            fix="guard.nonfinite=skip or stop, or servers.log=false",
            when=_has_log,
            words="servers.log=true servers.bound=4",
            why="the log records only updates, not the return to older weights",
        ),
        Exclusion(
            "recipe.schedule",
            among("plateau"),
            what="servers.log replays steps from their positions in the job, but with "
            "recipe.schedule=plateau evaluations change the rate",
            fix="servers.log=false, or another recipe.schedule",
            where="servers.log",
            when=_has_log,
            words="servers.log=true servers.bound=4",
            why="evaluations change the rate, but the log does not record them",
        ),
        *not_on_horovod(),
    ),
    rules=(
        Conflict(
            lambda job: job.config.guard.lost != "stop" and job.engine != "mpi",
            what="{set} is not supported with {chosen} on the {engine} engine",
            fix="comm.engine=mpi (mpirun --with-ft ulfm), or guard.lost=stop",
            key="guard.lost",
        ),
        needs_engine(
            "p2p",
            what="{chosen} needs sends between ranks, which the {engine} engine does not support",
            fix="comm.engine=mpi with the same mpirun, or comm.engine=torchdist",
            key="comm.engine",
            when=lambda job: "several_ranks" in job.features,
        ),
    ),
    lines_of_ranks=lambda config, hosts: [
        f"servers {_summary(ServersConfig.of(config), len(hosts))}"
    ],
)

FEATURES = (Added((SERVERS,), behind=optim.MUON),)

_ANY = ("servers.count", above(0))
ROWS = (
    AddedRows(
        (frameworks.JAX, frameworks.NUMPY, frameworks.KERAS),
        frameworks.excluded({"servers.count": frameworks.Supported((0,), 1)}),
        behind="parallel.pipeline",
    ),
    AddedRows((optim.MUON,), (Exclusion(*_ANY),), behind="parallel.dense"),
    AddedRows((optim.EMA,), (Exclusion(*_ANY, where="optim.ema"),), behind="shard.stage"),
    AddedRows((optim.THAW,), (Exclusion(*_ANY, where="model.thaw"),), behind="optim.ema"),
    AddedRows((optim.LORA,), (Exclusion(*_ANY, where="model.lora", why="not implemented yet"),)),
)

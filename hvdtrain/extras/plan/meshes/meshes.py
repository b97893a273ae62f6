"""The meshes of a job on a number of ranks: bytes and seconds of a step for each mesh, or why it is
impossible."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hvdtrain.comm.counted import Moved
from hvdtrain.comm.engines import Feature, features_of
from hvdtrain.config import plugins
from hvdtrain.config.exclusion import value_of
from hvdtrain.config.schema import Config, known_keys
from hvdtrain.config.sections.parallel import ParallelConfig
from hvdtrain.config.sections.shard import ShardConfig
from hvdtrain.errors import UserError
from hvdtrain.extras.plan.forecast.job import Forecast, Infeasible, forecast
from hvdtrain.extras.plan.meshes.link import BACKWARD, Link
from hvdtrain.extras.plan.meshes.machine import Machine
from hvdtrain.frameworks.footprint import PlannedWork
from hvdtrain.recipe.batch import resolve_batch_size
from hvdtrain.tasks.task import Task, tokens_of_sample
from hvdtrain.training.memory import MARGIN, forecast_memory, gib

_OF_A_PIPELINE = ("schedule", "virtual", "micro_batches")
_SCHEMES = ("a", "b", "c")


class MeshShape(NamedTuple):
    """The mesh that ranks are arranged in."""

    data: int
    tensor: int
    pipeline: int
    stage: int  # shard.stage
    dense: str  # parallel.dense
    context: int = 1

    @property
    def name(self) -> str:
        """The mesh for people: "2 data x 2 tensor, shard.stage=1"."""
        sizes = {
            "pipeline": self.pipeline,
            "data": self.data,
            "context": self.context,
            "tensor": self.tensor,
        }
        found = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1) or "1 data"
        return (
            found
            + f", shard.stage={self.stage}" * (self.stage > 0)
            + f", dense={self.dense}" * (self.dense != "none")
        )

    @property
    def has_stages(self) -> bool:
        return self.pipeline > 1

    @property
    def divides_layers(self) -> bool:
        """Whether ranks have parts of the model, other than of its dense part."""
        return self.has_stages or self.tensor > 1

    @property
    def words(self) -> str:
        """The mesh as configuration settings; empty if everything is replicated."""
        sizes = {
            "parallel.pipeline": self.pipeline,
            "parallel.context": self.context,
            "parallel.tensor": self.tensor,
        }
        words = [f"{key}={size}" for key, size in sizes.items() if size > 1]
        words += [f"shard.stage={self.stage}"] * (self.stage > 0) + [
            f"parallel.dense={self.dense}"
        ] * (self.dense != "none")
        return " ".join(words)


class MeshCandidate(NamedTuple):
    """A mesh on which the job fits into memory."""

    mesh: MeshShape
    time: StepTime
    sent_bytes: int  # bytes sent by the rank that sends most
    needs: float  # bytes on the rank that needs most, besides libraries and data
    evaluates: bool  # whether the evaluation takes most of them


class Excluded(NamedTuple):
    mesh: MeshShape
    reason: str


class Data(NamedTuple):
    """The data of the job."""

    task: Task
    samples: int


class MeshPlan(NamedTuple):
    rows: list[MeshCandidate]  # the fastest first
    excluded: list[Excluded]
    ranks: int
    batch: int  # samples in a step, the same for all meshes
    room: float  # bytes available on a rank, besides libraries and data
    machine: Machine
    assumed: list[str]  # assumptions about the machine and the meshes


def meshes(ranks: int, has_dense_part: bool, *, has_positions: bool = False) -> Iterator[MeshShape]:
    """Returns the possible meshes; those without tensor and pipeline parallelism first.

    has_positions: whether ranks may divide the positions of samples; not with stages, as these
    would be three times as many meshes.
    """
    # this copy may lack the extra
    for pipeline in _divisors(ranks) if "parallel.pipeline" in known_keys() else [1]:
        divisors = _divisors(ranks // pipeline)
        for tensor in divisors if "parallel.tensor" in known_keys() else [1]:
            data = ranks // pipeline // tensor
            if data == 1:
                stages = range(1)
            elif pipeline > 1:
                stages = range(3)
            else:
                stages = range(ParallelConfig().highest_stage + 1)
            yield from (MeshShape(data, tensor, pipeline, stage, "none") for stage in stages)
            if has_positions and pipeline == 1:
                yield from (
                    MeshShape(data // context, tensor, 1, stage, "none", context)
                    for context in _divisors(data)[1:]
                    for stage in stages
                )
            if data == ranks > 1 and has_dense_part:
                yield from (MeshShape(data, 1, 1, 0, scheme) for scheme in _SCHEMES)


def without_mesh(config: Config, ranks: int) -> Config:
    """Returns the job with only data parallelism and a fixed global batch, which is the same for
    every mesh."""
    plain = config.replace(parallel=ParallelConfig(), shard=ShardConfig())
    return resolve_batch_size(plain, ranks)


def with_mesh(config: Config, mesh: MeshShape, original: Config) -> Config:
    """Returns the job on a mesh. original: provides schedule, micro-batches and stages of a
    pipeline, parallel.sequence, and parallel.context_by."""
    of_pipeline: dict[str, Any] = {}
    if mesh.pipeline > 1:
        of_pipeline = {name: value_of(original, f"parallel.{name}") for name in _OF_A_PIPELINE} | {
            "pipeline": mesh.pipeline,
            "balance": _balance(original, mesh.pipeline),
        }
    of_tensor = {}
    if mesh.tensor > 1:
        of_tensor = {"tensor": mesh.tensor, "sequence": original.parallel.divides_positions}
    of_context = {}
    if mesh.context > 1:
        by = value_of(original, "parallel.context_by")
        of_context = {"context": mesh.context, "context_by": by}
    parallel = config.parallel.replace(
        **of_tensor,
        **of_context,
        **of_pipeline,
        **({} if mesh.dense == "none" else {"dense": mesh.dense}),
    )
    # no rank has the whole model for sampling
    log = config.log.replace(samples=0) if mesh.pipeline > 1 else config.log
    return config.replace(parallel=parallel, shard=config.shard.replace(stage=mesh.stage), log=log)


def _balance(original: Config, pipeline: int) -> list[int] | str:
    """Returns the given parallel.balance if it fits the pipeline; else operations, which need no
    measurement."""
    balance = value_of(original, "parallel.balance")
    fits = isinstance(balance, list) and len(balance) == pipeline * original.parallel.stages_of_rank
    return balance if fits else "operations"


def _assumed(config: Config, ranks: int) -> list[str]:
    """Returns a note if meshes do not use the job's parallel.balance."""
    if "parallel.balance" not in known_keys() or ranks == 1:
        return []
    balance = value_of(config, "parallel.balance")
    if balance == "operations":
        return []
    if balance == "seconds":
        return [
            "stages are cut by operations; parallel.balance=seconds measures at the start of a "
            "job (hvdtrain plan --pipeline)"
        ]
    return [
        f"parallel.balance={','.join(map(str, balance))} cuts pipelines of {len(balance)} stages; "
        "others are cut by operations"
    ]


def plan_meshes(
    config: Config,
    data: Data,
    ranks: int,
    machine: Machine,
    room: float,
    has_dense_part: bool,
    says: Callable[[str], None],
) -> MeshPlan:
    """Predicts a step of the job on each possible mesh. `says` is called with the name of each mesh
    first.

    Raises UserError if the job cannot run on this number of ranks with any mesh.
    """
    plain = without_mesh(config, ranks)
    features = _features(config, several_nodes=machine.per_node < ranks)
    rows = list[MeshCandidate]()
    excluded = list[Excluded]()
    # this copy may lack the extra
    has_positions = "parallel.context" in known_keys() and config.task.name == "language"
    for mesh in meshes(ranks, has_dense_part, has_positions=has_positions):
        says(mesh.name)
        try:
            found = _row(with_mesh(plain, mesh, config), mesh, data, machine, features, ranks)
        except UserError as error:
            excluded.append(Excluded(mesh, error.what))
            continue
        if found.needs > room:
            excluded.append(
                Excluded(
                    mesh,
                    f"needs {gib(found.needs)} of the {gib(room)} that a rank has beside "
                    "libraries and data",
                )
            )
        else:
            rows.append(found)
    rows.sort(key=lambda row: row.time.seconds)
    return MeshPlan(
        rows,
        excluded,
        ranks,
        plain.batch.size,
        room,
        machine,
        [*machine.assumed, *_assumed(config, ranks)],
    )


def plain_work(config: Config, data: Data, ranks: int) -> PlannedWork:
    """Returns the work of a step with a replicated model. Raises UserError if the job cannot run on
    this number of ranks."""
    one = forecast(without_mesh(config, ranks), data.samples, ranks, tokens_of_sample(data.task))
    if isinstance(one, Infeasible):
        raise one.error
    return _works(one, data.task, ranks, _features(config, several_nodes=False))[0]


def _features(config: Config, several_nodes: bool) -> frozenset[Feature]:
    """Returns the engine's features on one or several nodes; with several, mpi overlaps reductions
    with computation."""
    engine = "mpi" if config.comm.engine == "auto" else config.comm.engine
    beside: set[Feature] = {"asynchronous"} if engine == "mpi" and several_nodes else set()
    return features_of(engine) | beside


def _row(
    config: Config,
    mesh: MeshShape,
    data: Data,
    machine: Machine,
    features: frozenset[Feature],
    ranks: int,
) -> MeshCandidate:
    """Returns the prediction for a mesh. Raises UserError if the job cannot be divided in this
    way."""
    one = forecast(config, data.samples, ranks, tokens_of_sample(data.task))
    if isinstance(one, Infeasible):
        raise one.error
    works = _works(one, data.task, ranks, features)
    footprint = max((work.footprint for work in works), key=lambda found: found.total)
    overlaps = "asynchronous" in features and mesh.pipeline == 1
    time = step_time(one.config, works, machine, overlaps)
    return MeshCandidate(
        mesh,
        time,
        max(work.sent_bytes for work in works),
        MARGIN * footprint.total,
        footprint.evaluation > footprint.step,
    )


def _works(
    one: Forecast, task: Task, ranks: int, features: frozenset[Feature]
) -> list[PlannedWork]:
    config = one.config
    step = forecast_memory(
        config, task, one.recipe, ranks, features, one.dataset, config.batch.evaluate, 0
    ).step()
    framework_of(config)
    # imports torch
    from hvdtrain.extras.memory_forecast.predict import planned_work

    return planned_work(config, task, step, ranks, features)


def framework_of(config: Config) -> Any:
    """Returns the job's framework module. Raises UserError if the framework has no meshes."""
    framework: Any = plugins.load("frameworks", config.framework, config.where("framework"))
    if not hasattr(framework, "time_of_passes"):
        raise UserError(
            f"framework={config.framework} has no meshes to plan",
            config.where("framework"),
            "framework=torch",
        )
    return framework


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


_BETWEEN_STAGES = re.compile(r"pipeline\.(\d+)(\.gradient)?")
_IN_PASSES = ("tensor.", "dense.", "context.", "planned.")  # "planned.": of FSDP2
_OF_GRADIENTS = re.compile(r"gradient(\.\d+)?")


class StepTime(NamedTuple):
    """The time of a step of the slowest rank. `seconds` is at most the sum of the others, because
    some communication overlaps with computation."""

    seconds: float
    compute_s: float  # passes and update
    communication_s: float  # all communication of the rank, without overlap
    bubble: float  # share of the time of the passes in which a rank waits for other stages, 0 to 1


def moved_s(moved: Moved, machine: Machine) -> float:
    """Returns the seconds of one collective.

    Rings: an allreduce of B bytes on n ranks has 2 (n - 1) consecutive messages of B / n, a
    reduce-scatter or an all-gather has n - 1. Trees: a broadcast or a reduction has log2 n messages
    of B, rounded up. On several nodes the slower link counts. The ranks of a node share its link,
    because all groups like this one send at the same time.
    """
    n = len(moved.ranks)
    size = moved.size_bytes
    steps, part = {
        "allreduce": (2 * (n - 1), size / n),
        "reduce-scatter": (n - 1, size / n),
        "all-gather": (n - 1, size / n),
        "broadcast": (math.ceil(math.log2(n)), size),
        "reduce": (math.ceil(math.log2(n)), size),
        "message": (1, size),
    }[moved.kind]
    factor = machine.in_parts if n > 2 and moved.kind in ("reduce-scatter", "all-gather") else 1.0
    return factor * max(
        steps * (link.latency_s + part / link.bytes_per_s) for link in _links(moved.ranks, machine)
    )


def _links(ranks: Sequence[int], machine: Machine) -> list[Link]:
    nodes = [rank // machine.per_node for rank in ranks]
    if len(set(nodes)) == 1:
        return [machine.inside]
    sharers = machine.per_node / max(nodes.count(node) for node in set(nodes))
    shared = machine.between._replace(bytes_per_s=machine.between.bytes_per_s / max(1.0, sharers))
    if len(set(nodes)) == len(nodes):
        return [shared]
    return [machine.inside, shared]


def step_time(
    config: Config, works: Sequence[PlannedWork], machine: Machine, overlaps: bool
) -> StepTime:
    """Predicts the time of a step.

    works: the work of the first rank in each stage. overlaps: whether gradients are reduced during
    backward.
    """
    if config.parallel.has_stages:
        return _of_pipeline(config, works, machine)
    (work,) = works
    passes_s, update_s = computing_s(work, machine)
    in_passes, gradients, rest = _sorted(work.moved, machine)
    reduction_s = sum(gradients)
    hidden_s = 0.0
    if overlaps and gradients:  # the last bucket cannot overlap with backward
        hidden_s = min(reduction_s - gradients[-1], BACKWARD * passes_s / work.passes)
    communication_s = sum(in_passes) + reduction_s + sum(rest)
    return StepTime(
        passes_s + update_s + communication_s - hidden_s, passes_s + update_s, communication_s, 0.0
    )


def computing_s(work: PlannedWork, machine: Machine) -> tuple[float, float]:
    """Returns the seconds of the micro-batches and of the update."""
    passes_s = work.flops / machine.flops_per_s + work.touched_bytes / machine.touched_bytes_per_s
    return passes_s, work.updated_bytes / machine.updated_bytes_per_s


def _sorted(
    moved: Sequence[Moved], machine: Machine
) -> tuple[list[float], list[float], list[float]]:
    """Returns the seconds of communication inside passes, of gradients, and of the rest; without
    messages between stages."""
    in_passes = list[float]()
    gradients = list[float]()
    rest = list[float]()
    for each in moved:
        if not (each.kind == "message" and _BETWEEN_STAGES.fullmatch(each.name)):
            if each.name.startswith(_IN_PASSES):
                where = in_passes
            elif _OF_GRADIENTS.fullmatch(each.name):
                where = gradients
            else:
                where = rest
            where.append(moved_s(each, machine))
    return in_passes, gradients, rest


def _of_pipeline(config: Config, works: Sequence[PlannedWork], machine: Machine) -> StepTime:
    """Predicts a pipeline step: the simulated passes of the schedule, then reductions and updates,
    for the slowest rank."""
    micro = works[0].passes
    virtual = config.parallel.stages_of_rank
    # share of the operations in a forward pass
    share = 1 / (4 if config.model.recompute != "none" else 3)
    seconds = []
    transfers = [0.0] * (len(works) * virtual)
    after_s = 0.0
    compute_s = 0.0
    communication_s = 0.0
    for work in works:
        passes_s, update_s = computing_s(work, machine)
        in_passes, gradients, rest = _sorted(work.moved, machine)
        forward_s = (share * passes_s + sum(in_passes) / 2) / micro / virtual
        seconds.append((forward_s, (passes_s + sum(in_passes)) / micro / virtual - forward_s))
        of_messages = 0.0
        for each in work.moved:
            found = _BETWEEN_STAGES.fullmatch(each.name) if each.kind == "message" else None
            if found:
                one_s = moved_s(each, machine)
                transfers[int(found[1])] = max(transfers[int(found[1])], one_s)
                of_messages += one_s
        after_s = max(after_s, sum(gradients) + sum(rest) + update_s)
        compute_s = max(compute_s, passes_s + update_s)
        communication_s = max(
            communication_s, sum(in_passes) + sum(gradients) + sum(rest) + of_messages
        )
    passes_s, bubble = framework_of(config).time_of_passes(
        config, micro, seconds * virtual, transfers
    )
    return StepTime(passes_s + after_s, compute_s, communication_s, bubble)

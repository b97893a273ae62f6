"""Predicts a rank's memory, computation and communication: counts them in two steps of its learner
on tensors without data."""

from __future__ import annotations

import torch

from hvdtrain.comm.counted import Moved
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.memory_forecast.live_storages import FakeStorages, LiveStorages
from hvdtrain.frameworks.footprint import Footprint, PlannedStep, PlannedWork
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Making
from hvdtrain.frameworks.torch.arrangements import arrangement_of, is_arranged
from hvdtrain.frameworks.torch.assemble import assemble
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.planned import planned_mesh
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.frameworks.torch.private_api import FakeTensorMode
from hvdtrain.frameworks.torch.step_costs import FlopCounter, stopwatch_for
from hvdtrain.frameworks.torch.without_numbers import CopiedWithoutNumbers, side_effects_undone
from hvdtrain.tasks.task import Task

# for a step with more passes: like all later passes, the second adds to the gradients of the
# first
_PASSES = 2
_FUSION_MB = 4.0  # default of comm.fusion_mb


def predict(
    config: Config, task: Task, step: PlannedStep, ranks: int, features: frozenset[Feature]
) -> Footprint:
    """Predicts the memory of the rank that needs most, for an engine with these features. Nothing
    is allocated; a second for each stage of a pipeline, and no rank's help.

    Raises UserError if the model cannot be called with tensors that have no numbers, or cut.
    """
    most = step.passes if config.parallel.has_stages else _PASSES
    return max(
        (one.footprint for one in _works(config, task, step, ranks, features, most)),
        key=lambda found: found.total,
    )


def planned_work(
    config: Config, task: Task, step: PlannedStep, ranks: int, features: frozenset[Feature]
) -> list[PlannedWork]:
    """Returns what the first rank of each pipeline stage, or rank 0 without a pipeline, computes,
    sends and keeps in a step.

    Raises the same UserErrors as predict().
    """
    return _works(config, task, step, ranks, features, step.passes)


def _works(
    config: Config,
    task: Task,
    step: PlannedStep,
    ranks: int,
    features: frozenset[Feature],
    most_passes: int,
) -> list[PlannedWork]:
    try:
        with side_effects_undone():
            plain = _with_bucket_size(_without_libraries(config), config, ranks, features)
            return [
                _count(plain, task, step, ranks, features, stage, most_passes)
                for stage in range(config.parallel.pipe_ranks)
            ]
    except UserError:
        raise
    # in the user's model: it reads numbers, or calls functions outside torch
    except Exception as error:
        what = (
            f"the memory of {config.model.name} cannot be predicted: {type(error).__name__}: "
            f"{first_line(error)}"
        )
        raise UserError(
            what,
            config.where("model.name"),
            "a model whose shapes do not depend on the values of tensors",
        ) from error


def _without_libraries(config: Config) -> Config:
    """torch.compile keeps about what eager mode keeps; DDP's buckets are as large as ours."""
    reduce = "auto" if config.comm.reduce == "ddp" else config.comm.reduce
    return config.replace(
        speed=config.speed.replace(compile="none", device="cpu"),
        comm=config.comm.replace(tune=False, reduce=reduce),
    )


def _with_bucket_size(
    plain: Config, config: Config, ranks: int, features: frozenset[Feature]
) -> Config:
    """Returns the default size of a job on GPUs with NCCL: the plan computes on tensors of the
    CPU."""
    by_nccl = "nccl" in features and config.speed.device != "cpu"
    of_nccl = ranks // config.parallel.ranks if by_nccl else 0
    bucket_mb = config.comm.bucket_bytes(of_nccl) / 2**20
    return plain.replace(comm=plain.comm.replace(bucket_mb=bucket_mb))


def _horovod_reduces(config: Config, ranks: int, features: frozenset[Feature]) -> bool:
    """Whether hvd.DistributedOptimizer does: in the memory of the gradients, through Horovod's
    fusion buffer."""
    comm = config.comm
    needs_buckets = (
        comm.compression != "none"
        or comm.op == "adasum"
        or comm.local_steps > 1
        or comm.reduce == "bucket"
    )
    needs_buckets |= config.parallel.cuts or is_arranged(config)
    return ranks > 1 and "horovod_api" in features and not config.shard.stage and not needs_buckets


def _count(
    config: Config,
    task: Task,
    step: PlannedStep,
    ranks: int,
    features: frozenset[Feature],
    stage: int,
    most_passes: int,
) -> PlannedWork:
    """most_passes: maximum number of passes to plan in a step. Memory needs two, because the second
    adds to gradients, or as many as a pipeline runs at once."""
    fuses = _horovod_reduces(config, ranks, features)
    moved = list[Moved]()
    mesh = planned_mesh(config, 1 if fuses else ranks, features, stage, moved)
    live = FakeStorages()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        with CopiedWithoutNumbers():  # for a script's model and loss
            learner, start = _learner(config, task, mesh, features)
        inputs = learner.forward.inputs
        micro = [inputs.zeros(step.micro)] * min(step.passes, most_passes)
        hyper = Hyper(
            1e-3,
            0.9,
            config.optim.decay,
            step.samples * mesh.data.size,
            thaw=(0,) * len(config.model.thaw),
        )
        for p in learner.parameters:
            p.register_post_accumulate_grad_hook(lambda p: live.mark([p.grad], "gradients"))
        with learner.stopwatch.replaced_by(live):
            for _ in range(2):
                # the first step may create optimizer state and buffers that the second has from
                # its start
                mark(learner, live)
                live.reset_peak()
                moved.clear()
                with FlopCounter() as live.counter:
                    learner.step(micro, hyper, 0)
            of_step = tuple(moved)
            mark(learner, live)
            learner.sync_buffers(mesh.data)
        step_peak = live.peak
        live.reset_peak()
        for _ in range(2):
            learner.evaluate(inputs.zeros(step.evaluated))
        state = state_bytes(learner)
        sample = sum(array.nbytes for array in inputs.zeros(1).arrays.values())
    if fuses:
        gradients = sum(p.nbytes for p in learner.parameters)
        of_step = (
            Moved(
                "allreduce",
                "gradient",
                tuple(range(ranks)),
                gradients,
                2 * gradients * (ranks - 1) // ranks,
            ),
        )
        step_peak["communication"] += int((config.comm.fusion_mb or _FUSION_MB) * 2**20)
    footprint = Footprint(
        **step_peak,
        evaluation=live.peak_bytes,
        start=start,
        inputs=sample * step.samples * (1 + step.ahead),
        checkpoint=state * step.writes_checkpoints,
        copies=copies_bytes(learner) if config.keeps_copies and ranks > 1 else 0,
        largest_array=max(t.nbytes for t in state_tensors(learner)),
    )
    updated = sum(p.nbytes for p in learner.updated)
    return PlannedWork(
        footprint,
        float(live.counter.flops),
        float(live.touched_bytes),
        updated,
        len(micro),
        of_step,
    )


def _learner(
    config: Config, task: Task, mesh: Mesh, features: frozenset[Feature]
) -> tuple[TorchLearner, int]:
    """Returns the learner that build() creates, and the bytes needed at its start."""
    device = torch.device("cpu")
    stopwatch = ReplaceableStopwatch(stopwatch_for(device))
    precision = pick_precision(config, device, mesh.world)
    making = Making(
        config,
        task,
        mesh,
        device,
        precision,
        stopwatch,
        features,
    )
    arrangement = arrangement_of(config)(making)
    arrangement.cut()
    return assemble(arrangement), arrangement.start_bytes


def mark(learner: TorchLearner, live: LiveStorages) -> None:
    """Assigns named tensors to their kinds; called between two steps."""
    live.mark([p.data for p in learner.model.parameters()], "weights")
    live.mark(learner.model.buffers(), "buffers")
    states = [learner.optimizer.state[p] for p in learner.updated if p in learner.optimizer.state]
    live.mark(
        [t for state in states for t in state.values() if isinstance(t, torch.Tensor)],
        "optimizer_state",
    )
    held = learner.strategy.held()
    live.mark(held.gradients, "gradients")
    live.mark(held.in_transit, "communication")


def state_bytes(learner: TorchLearner) -> int:
    """Returns the number of bytes that rank 0 copies for a checkpoint."""
    return sum(t.nbytes for t in state_tensors(learner))


def state_tensors(learner: TorchLearner) -> list[torch.Tensor]:
    """Returns the weights, or the rank's part of them, its part of the optimizer's state, and what
    the strategy keeps."""
    weights = [learner.strategy.part(p).parameter for p in learner.model.parameters()]
    states = [learner.optimizer.state.get(shard.parameter, {}) for shard in learner.shards]
    tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    of_strategy = [own.tensor for own in learner.strategy.tensors().values()]
    return [*weights, *learner.model.buffers(), *tensors, *of_strategy]


def copies_bytes(learner: TorchLearner) -> int:
    """Returns the number of bytes that guard.lost keeps: a checkpoint's, but parts four times: this
    rank's and its neighbour's, of two sync points."""
    states = [learner.optimizer.state.get(shard.parameter, {}) for shard in learner.shards]
    parts = sum(t.nbytes for state in states for t in state.values() if isinstance(t, torch.Tensor))
    return state_bytes(learner) + 3 * parts * learner.is_sharded

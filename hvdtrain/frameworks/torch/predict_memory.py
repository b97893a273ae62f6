"""Predicts a rank's memory, computation and communication: counts them in two steps of its learner
on tensors without data."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hvdtrain.comm.counted import Moved
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError, first_line
from hvdtrain.frameworks.footprint import KINDS, Footprint, PlannedStep, PlannedWork
from hvdtrain.frameworks.stopwatch import PhaseTimes, ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Making
from hvdtrain.frameworks.torch.arrangements import arrangement_of, is_arranged
from hvdtrain.frameworks.torch.assemble import assemble
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.planned import planned_mesh
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.frameworks.torch.private_api import FakeTensorMode, TorchDispatchMode, tree_leaves
from hvdtrain.frameworks.torch.step_costs import FlopCounter, stopwatch_for
from hvdtrain.tasks.task import Task

# for a step with more passes: like all later passes, the second adds to the gradients of the
# first
_PASSES = 2
_FUSION_MB = 4.0  # default of comm.fusion_mb
KIND_OF_PHASE = {
    "forward": "activations",
    "backward": "activations",
    "communication": "communication",
    "update": "workspace",
}


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
    live = _FakeStorages()
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


@contextmanager
def side_effects_undone() -> Iterator[None]:
    """Restores torch's random generator, and keeps torch from logging what it cannot predict,
    because predict() raises it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        log.setLevel(level)


class CopiedWithoutNumbers(TorchFunctionMode):
    """Makes copy.deepcopy() work inside FakeTensorMode for tensors that are not parameters, such as
    buffers. Otherwise their numbers would be copied into a tensor without numbers."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*arguments, **(options or {}))
        tensor, memo = arguments
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.clone()
        return memo[id(tensor)]


class LiveStorages(TorchDispatchMode):
    """Counts each storage once, from the operation that returns it until it is freed. It is also
    the stopwatch, so it knows the phase.

    It does not see memory that a torch operation allocates and frees internally. Nothing is
    allocated inside a FakeTensorMode.

    FSDP2 frees whole weights by resizing their storages to 0, and later resizes them back; neither
    is an operation. reset_peak() finds the freed storages. From then on, such a storage counts from
    the operation that fills it until its size is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = dict.fromkeys(KINDS, 0)  # bytes
        self.peak = dict(self.now)  # bytes of each kind when their sum was largest
        self.peak_bytes = 0  # that sum
        self._bytes = 0
        self._live: dict[
            int, tuple[str, int, Any]
        ] = {}  # by number: kind, bytes, a weak reference that reports the end
        self._number_of: dict[
            int, int
        ] = {}  # a storage's number by its address, which a later storage may reuse
        self._numbers = 0
        self._whole = set[int]()  # numbers of the storages that were resized, and have memory
        self._kind = "workspace"

    def reset_peak(self) -> None:
        self._read_sizes(list(self._live))
        self.peak = dict(self.now)
        self.peak_bytes = self._bytes

    def mark(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Assigns tensors to a kind, also those created before."""
        for tensor in tensors:
            if tensor is not None:
                self._count(_storage(tensor), kind, remark=True)

    def enter(self, phase: str) -> None:
        self._kind = KIND_OF_PHASE.get(phase, "workspace")

    def read(self) -> list[PhaseTimes]:
        return []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._read_sizes(list(self._whole))
        if func.namespace == "fsdp":
            self.mark(_in_transit(func, args, kwargs or {}), "communication")
        for leaf in tree_leaves((result, (kwargs or {}).get("out"))):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
                self._count(_storage(leaf), self._kind, remark=False)
        return result

    def _read_sizes(self, numbers: list[int]) -> None:
        for number in numbers:
            known = self._live.get(number)
            alive = known and known[2].peek()
            if alive:
                self._has_size(number, alive[0].nbytes())

    def _has_size(self, number: int, size: int) -> None:
        """Records the size of a storage: one whose size has changed has whole weights of FSDP2."""
        kind, before, reference = self._live[number]
        if size != before:
            self._add(kind, -before)
            self._live[number] = "weights", size, reference
            self._add("weights", size)
            (self._whole.add if size else self._whole.discard)(number)

    def _count(self, storage: torch.UntypedStorage, kind: str, *, remark: bool) -> None:
        key = storage._cdata
        known = self._live.get(self._number_of.get(key, -1))
        if known is not None and (not remark or known[0] == kind):
            self._has_size(self._number_of[key], storage.nbytes())
            return
        if known is not None:
            number, (before, size, reference) = self._number_of[key], known
            self._add(before, -size)
        else:
            number = self._numbers
            size = storage.nbytes()
            self._numbers += 1
            self._number_of[key] = number
            reference = weakref.finalize(storage, self._end, key, number)
            reference.atexit = False
        self._live[number] = kind, size, reference
        self._add(kind, size)

    def _add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self._bytes += size
        if self._bytes > self.peak_bytes:
            self.peak = dict(self.now)
            self.peak_bytes = self._bytes

    def _end(self, key: int, number: int) -> None:
        kind, size, _ = self._live.pop(number)
        self._add(kind, -size)
        self._whole.discard(number)
        if self._number_of.get(key) == number:
            del self._number_of[key]


def _in_transit(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the buffer that an operation of FSDP2 fills before a collective: of an all-gather, of
    a reduce-scatter."""
    if func is torch.ops.fsdp.all_gather_copy_in.default:
        return [args[1]]
    return [kwargs["out"]] if func is torch.ops.fsdp.chunk_cat.default else []


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the storage of a tensor; for a DTensor the storage of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


# the host waits for it: float(tensor), `if mask.any()` of torch.nn.init
ASKS_FOR_NUMBER = torch.ops.aten._local_scalar_dense.default


def answer(tensor: torch.Tensor) -> bool | float:
    """Returns the number that the host reads from a tensor without numbers: False (no gradient was
    bad), or 1 (the number of a step)."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point():
        return 1.0
    return 1


class Answered(TorchDispatchMode):
    """A mode in which a tensor without numbers returns one when the host reads it. Initial weights
    that are redrawn until they fit need it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(args[0]) if func is ASKS_FOR_NUMBER else func(*args, **(kwargs or {}))


class _FakeStorages(LiveStorages):
    """Storages of fake tensors; the host gets the answers of answer()."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = FlopCounter()  # of the current step
        self.touched_bytes = 0  # by its passes
        self._in_passes = False

    def enter(self, phase: str) -> None:
        if phase in ("forward", "backward"):
            self._in_passes = True
        elif phase == "update" and self._in_passes:
            self.touched_bytes = self.counter.touched_bytes
            self._in_passes = False
        super().enter(phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_NUMBER:
            return answer(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

"""Learner: the interface of a framework for the trainer, returned by its build(); names in its
state; threads of a rank."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Piece, Readable
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import GoOn, Hyper, Progress, WorkerUpdate
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.tasks.task import Task

MADE_BY = (
    "s.made by "  # begins the entry that names a user's optimizer; no parameter's name has a space
)


class Gpu(NamedTuple):
    """The accelerator of a rank, as the driver knows it."""

    uuid: str  # "GPU-...", or empty
    why: str  # the reason why uuid is empty
    name: str  # name of the product
    peak_bytes: Callable[[], int]  # the most memory that this rank has allocated


class Predictions(NamedTuple):
    """The predictions of a model for the samples of a batch."""

    # (n, ...), the model's outputs, or its first output, on the host, in the order of the samples
    outputs: np.ndarray
    sums: Sums  # as returned by Learner.evaluate()


class Waited(NamedTuple):
    """The time that a pipeline's rank spent in the passes of some steps, and how long it waited."""

    seconds: float
    waiting: float  # part of this time spent waiting for other ranks
    # the share of waiting, 0 to 1, predicted from the last step's schedule with equally slow stages
    predicted: float


class CurrentPass(NamedTuple):
    """The pass that a rank is in: of a pipeline stage, or of a layer that is cut over ranks."""

    text: str  # "forward pass of micro-batch 2 in stage 1", "forward pass of blocks.3"
    waits_for: int | None  # the rank whose message it waits for


class TimedPass(NamedTuple):
    """One pass of a micro-batch through a stage, in seconds of time.perf_counter()."""

    kind: str  # "forward", "backward", "input gradient", "weight gradient"
    stage: int
    micro: int
    start_s: float
    stop_s: float
    waited_s: float  # part of this time spent waiting for the pass's inputs


class HasState(Protocol):
    """The part of a learner that checkpoints and the comparison of ranks use."""

    is_sharded: bool  # this rank has only parts of some arrays of state()

    def state(self, *, is_kept: bool = True) -> Arrays:
        """Returns a host copy of everything that a resume needs: "p.<name>" weights, "b.<name>"
        buffers, "s.<name>.<key>" optimizer state.

        Names and shapes are the same on all ranks and, for one model, in all frameworks; dtypes
        depend on the learner. A collective if the learner is_sharded. is_kept: false on a rank that
        only sends its parts and returns nothing.
        """

    def pieces(self) -> Iterator[Piece]:
        """Returns this rank's pieces of the arrays of state(); nothing is copied before
        Piece.read(), which may be called until the next step.

        The names are the same on all ranks, in the same order.
        """

    def state_dict_names(self) -> dict[str, str]:
        """Returns {name in the framework's state dict: name in state()} for weights and buffers; a
        tied array has two names."""

    def load(self, state: Arrays | ArrayStream) -> None:
        """Copies a state into the live arrays, this rank's part of each. Raises UserError if a name
        or shape does not match."""


class Learner(HasState, Protocol):
    """A model and its optimizer on this rank, and the computations of a step: everything that the
    trainer needs from a framework.

    One thread trains and calls all methods; only to_device() is also called by prefetching threads.
    Methods marked "A collective" communicate with the other ranks: every rank calls them, in the
    same order.

    A DeviceBatch is the result of to_device() of the same learner; its type depends on the
    framework. Sums are over samples, never means. Their values are device scalars that float()
    accepts, or vectors. Converting one may wait for the device; adding them does not.
    """

    # the phases of a step: the trainer enters "data" before it takes a batch, the learner enters
    # the others, and "" at the end
    stopwatch: Stopwatch
    # the ranks that read different samples: all ranks, unless several ranks share one model
    data: Communicator
    readers: (
        Communicator | None
    )  # the ranks that divide the samples of a step among them: `data`, or None on a rank that reads none  # noqa: E501
    # ranks wait for others only in the phase "communication"; the other phases are this rank's work
    waits_only_in_communication: bool

    def own_names(self, found: Mapping[str, Readable]) -> dict[str, Readable] | None:
        """Returns the arrays of a file, renamed by the model's library to the names of its state
        dict; None if no library does that.

        Arrays that the library does not use have other names. Raises UserError if it fails.
        """
        return None

    def cache_on_device(self, source: Source) -> bool:
        """Copies the whole set to the device if data.resident and the device allow it; returns
        whether it did. Called once, before the first step.

        to_device() then takes "indices" and "partner_indices" instead of the samples' fields.
        Raises UserError if data.resident=true and the set does not fit.
        """

    def to_device(self, batch: Batch) -> Any:
        """Copies a batch from host memory to the device, and applies the augmentation parameters
        that the batch has.

        The batch has the keys that core/arrays.py lists; n may be 0. The learner may keep the
        arrays' memory.
        """

    def step(self, micro: Sequence[Any], hyper: Hyper, seed: int) -> Sums:
        """Forward, backward, reduction over ranks, update. A collective.

        `micro` are DeviceBatches, one for each pass, the same number on every rank; a batch may be
        empty. `hyper` and `seed` are the same on all ranks. The loss is the sum of each sample's
        loss times its weight "w" (default 1), divided by the sum of Task.weight(), both over all
        ranks. This is the mean over the samples, or tokens, of the global batch.

        Returns this rank's unweighted sums over its samples: "count" and Task.sums, and with
        log.noise_scale NOISE_SCALE_KEYS. "nonfinite" is 1 / ranks if the loss of any rank or the
        mean gradient was not finite, else 0. With guard.nonfinite=skip, a step that is not finite
        does not change weights, buffers and optimizer state on any rank.
        """

    def sync_buffers(self, communicator: Communicator) -> None:
        """Makes values equal on all ranks that each computed from its own samples: running
        statistics, and weights after local steps.

        A collective. Call it before weights are compared, evaluated or saved.
        """

    def evaluate(self, batch: Any) -> Sums:
        """Returns "count" and Task.sums of a DeviceBatch in evaluation mode: no dropout, no label
        smoothing, running statistics."""

    def predict(self, batch: Any) -> Predictions:
        """Evaluates a DeviceBatch and also returns the model's outputs, for which the host waits.
        The batch must have samples."""

    def describe(self) -> str:
        """Returns one line: model, number of parameters, dtype, device, and how gradients are
        reduced."""

    def gpu(self) -> Gpu | None:
        """Returns the rank's GPU; None on a CPU."""

    def loss_scale(self) -> float | None:
        """Returns the factor of the loss in fp16, for which the host waits; None if there is
        none."""
        return None

    @property
    def number_type(self) -> str:
        """Returns the dtype of matrix products, as torch names it: "bfloat16"; empty if unknown."""
        return ""

    def profile(self, path: Path) -> AbstractContextManager[None]:
        """Writes a trace of the work inside, with the phases of each step, into the folder `path`.

        training/conflicts.py rejects profile.steps with a framework without a profiler.
        """

    # The following members are overridden by learners that need them; the defaults are for a
    # learner in one process.

    @property
    def module(self) -> Any:
        """The framework's object that is trained, such as a torch.nn.Module; None if models are
        functions."""
        return None

    @property
    def first_samples(self) -> int:
        """Returns the number of training samples from which the model computes some initial
        weights. The same on all ranks."""
        return 0

    def begin_with(self, batch: Any) -> None:
        """Computes these weights from a DeviceBatch of first_samples() samples. Only rank 0 calls
        it, before its state is broadcast."""
        assert not self.first_samples, "a learner that asks for samples takes them"

    def trains_one_sample(self) -> bool:
        """Whether a forward pass in training accepts one sample; tries it. A collective if forward
        passes are."""
        return True

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context the weights are their averages (optim.ema), for evaluate() and
        sampling; nothing else may be called.

        Does nothing without averages. Entering it is a collective.
        """
        return nullcontext()

    def own_steps(self, steps: Sequence[Progress]) -> Iterable[Progress]:
        """Yields the steps up to the next sync point that this rank makes, in order; they may not
        be known in advance.

        Each step is made before the next one is requested; then all ranks call sync_buffers().
        """
        return steps

    def read_updates(self) -> list[WorkerUpdate]:
        """Returns the updates of asynchronous steps since the last call, in order; only on rank
        0."""
        return []

    def read_waited(self) -> Waited | None:
        """Returns how long ranks of a pipeline waited since the last call; None if every rank has
        all layers."""
        return None

    def last_passes(self) -> list[TimedPass]:
        """Returns passes of this rank in the last step of a pipeline, in order; none if every rank
        has all layers."""
        return []

    def under_way(self) -> CurrentPass | None:
        """Returns the current pass; callable from any thread. None between steps, and if passes
        never wait for other ranks."""
        return None

    def divide_anew(self) -> None:
        """Takes this rank's part among the remaining ranks after a loss, if is_sharded. load() then
        restores the values."""
        raise TypeError(f"the parts of {type(self).__name__} cannot become those of other ranks")

    def how_to_go_on(self, former_rank: int, kept: int) -> GoOn | None:
        """Returns how to continue after ranks died; None if all ranks roll back to a sync point. A
        collective; it may be called again after another loss.

        former_rank: the previous number of this rank. kept: the steps at the sync point to which
        this rank would roll back.
        """
        return None

    def go_on(self, how: GoOn, kept: int) -> None:
        """Called when all ranks have agreed to continue; own_steps() of the same steps then yields
        the remaining ones."""
        raise TypeError(f"{type(self).__name__} goes back to a sync point")


def global_weight(task: Task, own: float, batch: int, communicator: Communicator) -> float:
    """Returns the sum of Task.weight() over the `batch` samples of a step; this rank's samples
    contribute `own`.

    If all samples have the same weight, no communication is needed. Otherwise this is a collective:
    one small allreduce before the first backward pass. Every gradient is then divided once, by the
    exact number, whatever strategy reduces it. (Dividing after the reduction would take a second
    pass over all gradients, and clipping, noise scale and local steps would have to allow for it.)
    """
    if task.sample_weight is not None:
        return batch * task.sample_weight
    # exact: float64 represents every integer up to 2**53
    total = communicator.allreduce(np.array([float(own)]), "step.weight")
    found = float(total[0])
    return max(1, round(found)) if found.is_integer() else found  # of weights that are not whole


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Returns Learner.state_dict_names() for frameworks whose state dict has the same names without
    "p." and "b."."""
    return {name[2:]: name for name in names if name.startswith(("p.", "b."))}


def gather(communicator: Communicator, pieces: Iterable[Piece], *, is_kept: bool = True) -> Arrays:
    """Yields a copy of every array in turn; `communicator` connects the ranks that hold parts. A
    collective if arrays are sharded.

    is_kept: false on a rank that only sends its parts; it returns nothing, and holds one array at a
    time.
    """
    pieces = list(pieces)
    in_parts = any(not piece.is_whole for piece in pieces)
    of_ranks = (
        communicator.allgather_object([list(piece.runs()) for piece in pieces]) if in_parts else []
    )

    def copy_of(i: int, piece: Piece) -> np.ndarray:
        if piece.is_whole:
            return piece.read().copy()
        return gather_one(
            communicator,
            piece.name,
            piece.shape,
            piece.read(),
            [of_rank[i] for of_rank in of_ranks],
        )

    if is_kept:
        return {piece.name: copy_of(i, piece) for i, piece in enumerate(pieces)}
    for i, piece in enumerate(pieces):
        if not piece.is_whole:
            copy_of(i, piece)
    return {}


def gather_one(
    communicator: Communicator,
    name: str,
    shape: tuple[int, ...],
    own: np.ndarray,
    runs: Sequence[Sequence[tuple[int, int]]],
) -> np.ndarray:
    """Gathers an array whose elements are spread over ranks: `own` are this rank's elements,
    runs[rank] are the ranges of a rank's elements in the array. A collective."""
    parts = communicator.allgather(own, f"gather.{name}")
    done = 0
    whole = np.empty(shape, parts.dtype).reshape(-1)
    for first, behind in itertools.chain.from_iterable(runs):
        whole[first:behind] = parts[done : done + behind - first]
        done += behind - first
    return whole.reshape(shape)


Shapes = Mapping[str, tuple[int, ...]]


def check_fit(model: Shapes, state: Shapes, is_partial: bool = False) -> None:
    """Raises UserError if `state` lacks an array of the model (a partial one may), has one more,
    or has one in another shape."""
    where = "state of the model"
    fix = "use the model and options of the checkpoint, which are in its run folder's config.yaml"
    if differing := sorted(
        state.keys() - model.keys() if is_partial else model.keys() ^ state.keys()
    ):
        side = "the state lacks" if differing[0] in model else "the model lacks"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise UserError(f"{side} {differing[0]}{more}", where, fix)
    for name, shape in state.items():
        if model[name] != shape:
            raise UserError(f"{name} has shape {shape}, the model has {model[name]}", where, fix)


def check_maker(maker: str, names: Iterable[str]) -> None:
    """Raises UserError if the optimizer state among the names of a state was made by another user
    function than `maker`.

    A state without optimizer state matches every optimizer; for a rule, `maker` is empty.
    """
    state = [name for name in names if name.startswith("s.")]
    theirs = next((name.removeprefix(MADE_BY) for name in state if name.startswith(MADE_BY)), "")
    if state and theirs != maker:
        there = theirs or "one of hvdtrain's own optimizers"
        here = maker or "one of hvdtrain's own"
        fix = f"optim.name={theirs}" if theirs else "the optim.name of its run folder's config.yaml"
        raise UserError(
            f"the checkpoint was written with {there}, but this job has optim.name={here}",
            "state of the optimizer",
            fix,
        )


def asked_threads() -> int | None:
    """Returns OMP_NUM_THREADS, or None if it is not a positive number. In a list, with one number
    per nested level, the first one counts."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def fair_threads(communicator: Communicator) -> int:
    """Returns this rank's share of the cores that it may use. A collective."""
    cores = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    mine = (socket.gethostname(), tuple(cores))
    # the launcher may bind each rank to different cores, or all ranks to the same
    sharers = communicator.allgather_object(mine).count(mine)
    return max(1, len(cores) // sharers)

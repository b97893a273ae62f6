"""A run's model, whole on every rank or in parts, with the weights of one of its checkpoints and the task that it was trained for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import long_on_rank_0, on_rank_0
from hvdtrain.config.schema import Config, ParallelConfig, ShardConfig
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import MEMORY, UserError, exit_code_of
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.state import check_fit
from hvdtrain.optim.ema import averages
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import build_learner
from hvdtrain.training.build_task import restore_task
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged
from hvdtrain.training.replicas.broadcast import broadcast_state

IN_PARTS = "on several ranks (mpirun -np N) shard.stage=3 comm.engine=mpi gives each its parts of the weights"


class TrainedModel(NamedTuple):
    """A trained model, equal on all ranks."""

    learner: Learner  # with shard.stage=3 on several ranks each has its parts of the weights: then every pass is a collective
    task: Task  # with the statistics of the training set
    checkpoint: Checkpoint
    notes: list[str]  # lines for the user: damaged checkpoints that were skipped


def load_trained_model(
    config: Config,
    communicator: Communicator,
    read: Callable[[bool, Callable[[], None]], tuple[Checkpoint, Arrays, list[str]]],
    restore: Callable[[Config, dict[str, Any]], Task] = restore_task,
    go_on: Callable[[], None] = lambda: None,
) -> TrainedModel:
    """Builds the model of the configuration, and loads the weights that read(mapped, on_piece) returns on rank 0. Every rank calls it.

    restore: the task, of the Task.facts() of the checkpoint. go_on: called on every rank while rank 0 reads or sends, so that its time
    counts for no limit.

    With shard.stage=3 on several ranks each of them keeps its parts of the weights, which rank 0 sends one by one from where they lie on
    the disk (mapped): no rank has them all. Raises UserError on all ranks where read() does, or the weights do not fit the model.
    """
    in_parts = config.shard.stage == 3 and communicator.size > 1
    if in_parts and config.optim.ema is not None:
        what = "the averages of optim.ema are read from whole arrays, not with shard.stage=3"
        raise UserError(what, config.where("shard.stage"), "shard.stage=0, or optim.ema=null for the weights themselves")
    if not in_parts:  # stages 1 and 2 divide what only training has
        config = config.replace(shard=ShardConfig())
    try:
        return _load(config, communicator, lambda on_piece: read(in_parts, on_piece), restore, go_on)
    except Exception as error:
        if exit_code_of(error) == MEMORY and not in_parts and config.framework == "torch":
            error.add_note(f"hvdtrain: the model is whole on each rank; {IN_PARTS}")
        raise


def _load(
    config: Config,
    communicator: Communicator,
    read: Callable[[Callable[[], None]], tuple[Checkpoint, Arrays, list[str]]],
    restore: Callable[[Config, dict[str, Any]], Task],
    go_on: Callable[[], None],
) -> TrainedModel:
    weights: Arrays = {}

    def read_on_rank_0(moved: Callable[[], None]) -> tuple[Checkpoint, list[str]]:
        nonlocal weights
        checkpoint, arrays, notes = read(moved)
        weights = {name: array for name, array in arrays.items() if not name.startswith("s.")}
        if config.optim.ema is not None and checkpoint.train_state.progress.step:
            weights |= averages(arrays)
        return checkpoint, notes

    checkpoint, notes = long_on_rank_0(communicator, read_on_rank_0, go_on)
    task = task_of(config, checkpoint, restore)
    learner = build_learner(config.replace(parallel=ParallelConfig()), task, communicator)
    shapes = {piece.name: piece.shape for piece in learner.pieces() if not piece.name.startswith("s.")}
    on_rank_0(communicator, lambda: check_fit(shapes, {name: array.shape for name, array in weights.items()}))
    broadcast_state(communicator, learner, weights, only_weights=True, on_array=go_on)
    return TrainedModel(learner, task, checkpoint, notes)


def task_of(config: Config, checkpoint: Checkpoint, restore: Callable[[Config, dict[str, Any]], Task] = restore_task) -> Task:
    """What the checkpoint's model was trained for. Raises Damaged where that is missing or impossible."""
    try:
        return restore(config, checkpoint.identity["data"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"the checkpoint does not say what it was trained for: {error}"
        raise Damaged(what, str(checkpoint.folder), "use another checkpoint, or restore the run folder from a copy") from None

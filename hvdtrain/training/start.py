"""The initial state of all ranks, new or from the newest checkpoint, and the run folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Piece
from hvdtrain.core.folder import Folder
from hvdtrain.core.metrics import zero_sums
from hvdtrain.core.progress import Progress
from hvdtrain.data.sampler import evaluated_samples
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.recipe.clock import total_samples
from hvdtrain.tasks.task import objective
from hvdtrain.training.checkpoint.array_file import HEADER_BYTES
from hvdtrain.training.checkpoint.changes import Change
from hvdtrain.training.checkpoint.load import load_found
from hvdtrain.training.checkpoint.ranges import CheckpointInParts
from hvdtrain.training.checkpoint.resume import (
    Reading,
    ResumePoint,
    find_resume_point,
    former_run,
)
from hvdtrain.training.checkpoint.room import needed_bytes
from hvdtrain.training.data_facts import identity
from hvdtrain.training.datasets import Datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import stop_reason
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.run_folder import (
    check_run_folder,
    open_run_folder,
    remove_if_empty,
    write_config,
)
from hvdtrain.training.run_lock import RunLock

_MOST_RANKS = 2**12  # of a checkpoint that fewer ranks resume


class Start(NamedTuple):
    """The initial state of a job, the same on all ranks."""

    run: Path  # path of the run folder on rank 0
    train_state: TrainState
    resumed_from: str | None  # the run folder that the state came from
    notes: list[str]  # lines for the user
    changes: list[Change]  # in the configuration of the resumed run
    # whether config.yaml has the configuration; if not, the first checkpoint trained with it writes
    # it
    config_is_written: bool
    is_over: bool  # nothing to do: the run folder stays as it is
    digest: str  # digest of the state on all ranks
    weights: int  # numbers that are trained
    checkpoint_limit_bytes: int  # the largest possible checkpoint file of this job


class Found(NamedTuple):
    """The state that rank 0 found in the run folder."""

    run: Path
    point: ResumePoint
    notes: list[str]
    goes_on: bool  # resumes the run in this folder
    is_over: bool


def bytes_of_ranks(pieces: Sequence[Piece]) -> int:
    """Returns the largest size of what each rank has for itself, in a checkpoint of many ranks."""
    return _MOST_RANKS * sum(
        piece.nbytes // piece.shape[0] for piece in pieces if piece.is_of_ranks
    )


def start_or_resume(
    config: Config,
    datasets: Datasets,
    communicator: Communicator,
    learner: Learner,
    lock: RunLock,
    heartbeat: Heartbeat,
) -> Start:
    """Creates and locks the run folder, and gives all ranks the same state. Every rank calls it.

    Raises UserError on all ranks if no checkpoint is good or matches, or if the run folder cannot
    be written, is full or is in use.
    """
    pieces = list(learner.pieces())
    array_bytes = sum(piece.nbytes + HEADER_BYTES for piece in pieces)
    limit_bytes = 2**20 + 8 * array_bytes  # a user's optimizer may not have created its state yet
    weights = sum(math.prod(piece.shape) for piece in pieces if piece.name.startswith("p."))
    opened: tuple[Path, list[str]] | None = None  # opened once, even if a checkpoint is damaged

    def find(reading: Reading) -> tuple[Found, Arrays | CheckpointInParts | None]:
        nonlocal opened
        opened = opened or open_run_folder(config, lock)
        run, notes = opened
        try:
            # read again, because the previous job may just have written its last checkpoint
            former = former_run(config)
            beginning = begin(config, datasets)
            point, arrays = find_resume_point(
                former,
                config,
                identity(config, datasets),
                beginning,
                reading,
                pieces,
            )
            goes_on = former is not None and former.resolve() == run.resolve()
            is_over = goes_on and bool(stop_reason(config, point.train_state))
            if not is_over:
                check_run_folder(run, needed_bytes(array_bytes))
        except UserError:
            lock.release()
            remove_if_empty(run)
            raise
        return Found(run, point, [*notes, *point.notes], goes_on, is_over), arrays

    heartbeat.beat("reading the checkpoint", 0, 0)
    loaded = load_found(
        communicator, learner, find, limit_bytes + bytes_of_ranks(pieces), heartbeat.go_on
    )
    run, point, notes, goes_on, is_over = loaded.found
    if loaded.digest is None:
        digest, lines = _first_weights(config, datasets, communicator, learner, heartbeat)
        notes = [*notes, *lines]
    else:
        digest = loaded.digest
    if (
        not goes_on
    ):  # not earlier, so that the run folder does not change if the state does not match the model
        on_rank_0(communicator, lambda: _write_first_files(config, datasets, run, lock))
    return Start(
        run=run,
        train_state=point.train_state,
        resumed_from=None if goes_on or point.resumed is None else config.resume,
        notes=notes,
        changes=point.changes or [],
        config_is_written=not goes_on or point.changes == [],
        is_over=is_over,
        digest=digest,
        weights=weights,
        checkpoint_limit_bytes=limit_bytes,
    )


def _first_weights(
    config: Config,
    datasets: Datasets,
    communicator: Communicator,
    learner: Learner,
    heartbeat: Heartbeat,
) -> tuple[str, list[str]]:
    """Gives all ranks the weights of a new job; returns their digest and lines for the user. A
    collective."""
    if learner.first_samples:
        heartbeat.beat("computing the first weights, begin_with()", 0, 0)
        on_rank_0(communicator, lambda: begin_with_samples(config, datasets, learner))
        heartbeat.beat("broadcasting the first weights", 0, 0)
    digest = broadcast_state(communicator, learner, None, on_array=heartbeat.go_on)
    if config.model.weights is None:
        return digest, []
    from hvdtrain.training.pretrained import load_pretrained

    heartbeat.beat("reading the pretrained weights", 0, 0)
    return load_pretrained(config, communicator, learner, heartbeat.go_on)


def begin(config: Config, datasets: Datasets) -> TrainState:
    """Returns the initial TrainState, with the sums and the objective of the task."""
    samples = len(datasets.train)
    metric = objective(datasets.task)
    progress = Progress(samples, total_samples(config, samples))
    state = TrainState(
        progress,
        sums=zero_sums(datasets.task.sums),
        objective=metric.name,
        better=metric.better,
    )
    return state.evaluated_by(config.evaluate, len(datasets.val))


def begin_with_samples(config: Config, datasets: Datasets, learner: Learner) -> None:
    """Initializes the model with samples of the training set, drawn by the seed; all samples of a
    small set. Raises UserError for a damaged sample."""
    train = datasets.train
    batch = train.read(
        evaluated_samples(len(train), min(learner.first_samples, len(train)), config.seed)
    )
    learner.begin_with(
        learner.to_device(
            {name: array for name, array in batch.items() if name in datasets.task.fields}
        )
    )


def _write_first_files(config: Config, datasets: Datasets, run: Path, lock: RunLock) -> None:
    """Writes config.yaml and the data's files in the run folder. Raises UserError, for example on a
    full disk."""
    try:
        for name, content in datasets.train.run_files.items():
            with Folder.open(run) as folder:
                folder.replace(name, content)
        write_config(config, run, lock)
    except OSError as error:
        what = f"cannot write config.yaml: {error.strerror or error}"
        raise UserError(
            what, str(run), "give run= a folder that can be written, with room"
        ) from None

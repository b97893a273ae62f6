"""The checkpoint of a run that a command reads, the newest, the best, or the one of a name, and the
model with its weights."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.read import read_run_config
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.errors import UserError, nearest
from hvdtrain.extras.trained_models.arguments import Arguments
from hvdtrain.extras.trained_models.trained_model import TrainedModel, load_trained_model
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import restore_task
from hvdtrain.training.checkpoint import files, prune
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged
from hvdtrain.training.checkpoint.ranges import CheckpointInParts
from hvdtrain.training.checkpoint.resume import GoodCheckpoint, Reading
from hvdtrain.training.run_rank import ConnectedRank


class LoadedCheckpoint(NamedTuple):
    checkpoint: Checkpoint
    arrays: Arrays
    notes: list[str]  # for people: damaged checkpoints that were skipped


def read_checkpoint(run: Path, which: str) -> LoadedCheckpoint:
    """Reads a checkpoint of a run; which and errors as in find_checkpoint()."""
    found = find_checkpoint(run, which, Reading(sys.maxsize))
    assert not isinstance(found.arrays, CheckpointInParts), "not asked for"
    return LoadedCheckpoint(found.checkpoint, found.arrays, found.notes)


def find_checkpoint(run: Path, which: str, reading: Reading) -> GoodCheckpoint:
    """Finds a checkpoint of a run, and reads it.

    which: newest or best, which skip damaged checkpoints; or a name; empty: the checkpoint whose
        weights are the result of the run
    reading: if mapped, maps only the weights, so that the checkpoint may be larger than this
        machine's memory

    Raises UserError if there is no checkpoint, Damaged if the named one is damaged.
    """
    folders = files.finished(run)
    if not folders:
        raise UserError(
            f"no checkpoint in {run}",
            "RUN",
            "give the run folder: it has a folder checkpoints/step-...",
        )
    if not which:
        which = "best" if is_set(run, "stop.restore_best") and prune.best(folders, 1) else "newest"
    if which == "newest":
        return _first_undamaged(run, reversed(folders), [], reading)
    if which == "best":
        best_first, notes = _best_first(run, folders)
        return _first_undamaged(run, best_first, notes, reading)
    for folder in folders:
        if folder.name == which:
            return _load(folder, [], reading)
    raise UserError(
        f"{run} has no checkpoint {which}",
        "--checkpoint",
        nearest(which, ["newest", "best", *(f.name for f in folders)]),
    )


def load_model(rank: ConnectedRank, parsed: Arguments) -> TrainedModel:
    """Loads the model of the run with the weights of --checkpoint, replicated or partitioned. Every
    rank calls it. Raises UserError."""
    rank.heartbeat.beat("reading the checkpoint", 0, 0)
    return load_checkpoint(rank, parsed.options["checkpoint"])


def load_checkpoint(
    rank: ConnectedRank,
    which: str,
    restore: Callable[[Config, dict[str, Any]], Task] = restore_task,
) -> TrainedModel:
    """Builds the model of a run with the weights of checkpoint `which`; restore as in
    load_trained_model()."""
    run = run_folder(rank)
    return load_trained_model(
        unstaged(rank.config),
        rank.communicator,
        lambda reading: find_checkpoint(run, which, reading),
        restore,
        rank.heartbeat.go_on,
    )


def run_folder(rank: ConnectedRank) -> Path:
    return Path(os.path.expanduser(rank.config.resume))


def _first_undamaged(
    run: Path, folders: Iterable[Path], notes: list[str], reading: Reading
) -> GoodCheckpoint:
    for folder in folders:
        try:
            return _load(folder, notes, reading)
        except Damaged as error:
            notes.append(_skipped(folder, error))
    what = f"no checkpoint of {run} is good: {notes[0]}"
    raise UserError(
        what, str(run / "checkpoints"), "restore its files from a copy of the run folder"
    )


def _best_first(run: Path, folders: list[Path]) -> tuple[list[Path], list[str]]:
    """Returns checkpoints that were evaluated at their step, the best first (the earlier in a tie),
    and a note for each damaged one."""
    states = {}
    notes = []
    for folder in folders:
        try:
            states[folder] = files.read_numbers(folder).train_state
        except Damaged as error:
            notes.append(_skipped(folder, error))
    rated = prune.best_first(states)
    if not rated:
        what = "; ".join([f"no checkpoint of {run} was evaluated at its own step", *notes])
        raise UserError(what, "--checkpoint best", "--checkpoint newest")
    return rated, notes


def _skipped(folder: Path, error: Damaged) -> str:
    return (
        f"damaged {folder.name} is skipped: "
        f"{error.what.removeprefix('the checkpoint is damaged: ')}"
    )


def _load(folder: Path, notes: list[str], reading: Reading) -> GoodCheckpoint:
    """Loads a checkpoint, and compares every file with its checksum. Raises Damaged, UserError."""
    checkpoint = files.read_numbers(folder)
    parts = reading.find_parts(folder)
    if parts is not None:
        return GoodCheckpoint(checkpoint, parts, notes)
    if reading.mapped:
        weights = files.read_arrays(
            folder,
            reading.limit_bytes,
            files.ARRAYS[:1],
            mapped=True,
            on_piece=reading.on_piece,
        )
        return GoodCheckpoint(checkpoint, weights, notes)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed_bytes = 0
    with contextlib.suppress(OSError):  # reported by read_arrays()
        needed_bytes = sum((folder / name).stat().st_size for name in files.ARRAYS)
    if needed_bytes > memory_bytes:
        what = (
            f"the checkpoint has {needed_bytes:,} bytes, this machine {memory_bytes:,} bytes of "
            "memory"
        )
        raise UserError(what, str(folder), "export it on a machine with more memory")
    arrays = files.read_arrays(folder, memory_bytes, on_piece=reading.on_piece)
    return GoodCheckpoint(checkpoint, arrays, notes)


def is_set(run: Path, key: str) -> bool:
    """Whether a key of the run is neither null nor false."""
    with contextlib.suppress(UserError):
        return any(
            assignment.key == key and assignment.value not in (None, False)
            for assignment in read_run_config(run)
        )
    return False

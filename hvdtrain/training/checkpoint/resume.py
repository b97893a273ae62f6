"""What a job resumes from: the newest good checkpoint of a run folder, if it belongs to this
job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Piece
from hvdtrain.core.folder import Folder
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Shapes, check_fit
from hvdtrain.training.checkpoint import files, prune
from hvdtrain.training.checkpoint.changes import (
    Change,
    changes,
    ended_by_hook,
    flat,
    further,
    refuse_another_job,
    refuse_another_model,
    refuse_another_optimizer,
    resume_command,
)
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged, Identity
from hvdtrain.training.checkpoint.ranges import CheckpointInParts, find_parts
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import stop_reason, time_is_over

# keys of a script that passes a task as functions
_OF_OBJECTS = (
    "data.task",
    "data.loss.",
    "data.metrics.",
)
_OF_CONFIG = "the data and seed that the run folder's config.yaml names"
_OF_INPUTS = {"data.mean": 0.0, "data.std": 1.0}  # if x is not standardized
_FIRST_EVENT_BYTES = 2**20  # a start event has some kilobytes


class ResumePoint(NamedTuple):
    """The state that a job resumes from, as rank 0 found it."""

    resumed: Path | None  # the run folder; None for a new job
    train_state: TrainState
    notes: list[str]  # lines for the user
    changes: list[Change] | None  # changes of that run's configuration; None if it cannot be read


class Reading(NamedTuple):
    """How the arrays of a checkpoint are read."""

    limit_bytes: int  # of a file
    mapped: bool = False  # as read_arrays()
    on_piece: Callable[[], None] = lambda: None  # as read_arrays()
    # of a checkpoint that several ranks wrote, only the headers: each rank reads its own elements
    in_parts: bool = False
    # why checkpoints, by the names of their folders, are known to be damaged
    damaged: Mapping[str, str] = {}

    def read(self, folder: Path) -> Arrays | CheckpointInParts:
        """Reads the checkpoint's arrays. Raises Damaged."""
        return self.find_parts(folder) or files.read_arrays(
            folder, self.limit_bytes, mapped=self.mapped, on_piece=self.on_piece
        )

    def find_parts(self, folder: Path) -> CheckpointInParts | None:
        """Returns what each rank needs to read its own elements; None if rank 0 reads all of them.
        Raises Damaged."""
        if folder.name in self.damaged:
            raise Damaged(self.damaged[folder.name], str(folder))
        return find_parts(folder, self.limit_bytes) if self.in_parts else None


class GoodCheckpoint(NamedTuple):
    """A checkpoint whose arrays can be read."""

    checkpoint: Checkpoint
    arrays: Arrays | CheckpointInParts
    notes: list[str]  # a line for each newer, damaged one

    @property
    def shapes(self) -> Shapes:
        """Shapes of its arrays, by name."""
        if isinstance(self.arrays, CheckpointInParts):
            return self.arrays.shapes
        return {name: array.shape for name, array in self.arrays.items()}


def find_resume_point(
    run: Path | None,
    config: Config,
    identity: Identity,
    beginning: TrainState,
    reading: Reading,
    pieces: Sequence[Piece] | None = None,
) -> tuple[ResumePoint, Arrays | CheckpointInParts | None]:
    """On rank 0, finds the state to resume from and its arrays; None for a new job, whose state is
    `beginning`.

    run: as from former_run(); pieces: of the job's arrays, used for advice. Raises UserError if no
    checkpoint is good, or if the newest good one belongs to another job.
    """
    if run is None:
        return ResumePoint(None, beginning, [], []), None
    good = newest(run, reading)
    found = good.checkpoint
    arrays = good.arrays
    notes = good.notes
    check_identity(found, identity)
    check_sums(found, beginning)
    progress = dataclasses.replace(found.train_state.progress, total=beginning.progress.total)
    if time_is_over(config, found.train_state.seconds):
        progress = progress.end_here()
    train_state = dataclasses.replace(found.train_state, progress=progress)
    if train_state.target != config.stop.target:  # evaluations at another target do not count
        train_state = dataclasses.replace(train_state, at_target=0)
    if difference := train_state.difference(beginning):
        counts = (
            ", stop.patience and the count of recipe.schedule=plateau"
            if config.recipe.schedule == "plateau"
            else " and stop.patience"
        )
        notes.append(f"{difference}: the best one{counts} start over")
        train_state = train_state.forget_evaluations()
    train_state = train_state.evaluated_as(beginning)
    try:
        changed = changes(run, config)
    except UserError as error:
        return ResumePoint(
            run,
            ended_by_hook(train_state, []),
            [*notes, f"changed keys are unknown: {error.what}"],
            None,
        ), arrays
    train_state = ended_by_hook(train_state, changed)
    refuse_another_optimizer(changed, config, run)
    refuse_another_model(changed, config, run)
    misfit = "" if pieces is None else misfit_of(config, pieces, good.shapes)
    refuse_another_job(changed, config, run, train_state, misfit)
    _refuse_copy(config, run, train_state)
    return ResumePoint(
        run, train_state, notes + [str(change) for change in changed], changed
    ), arrays


def misfit_of(config: Config, job: Sequence[Piece], checkpoint: Shapes) -> str:
    """Returns why a checkpoint's arrays do not match this job's, such as "the state lacks
    b.norm1.running_mean"; empty if they match."""
    # a user's class creates its state in the first step
    compared = ("p.", "b.") if is_dotted(config.optim.name) else ("p.", "b.", "s.")
    ours = {piece.name: piece.shape for piece in job if piece.name.startswith(compared)}
    theirs = {name: shape for name, shape in checkpoint.items() if name.startswith(compared)}
    for piece in job:
        shape = theirs.get(piece.name)
        if piece.is_of_ranks and shape is not None and shape[1:] == piece.shape[1:]:
            theirs[piece.name] = piece.shape
    if config.parallel.has_stages:  # rank 0 has only its stage's arrays
        theirs = {name: shape for name, shape in theirs.items() if name in ours}
    try:
        check_fit(ours, theirs)
    except UserError as error:
        return error.what
    return ""


def former_run(config: Config) -> Path | None:
    """Returns the run folder to resume from: run= once it has a checkpoint of this command, else
    resume=."""
    run = Path(config.run).expanduser() if config.run is not None else None
    if config.resume == "no":
        return None
    if (
        run is not None
        and files.finished(run)
        and (config.resume == "auto" or began_from(run) == config.resume)
    ):
        return run
    return None if config.resume == "auto" else Path(config.resume).expanduser()


def began_from(run: Path) -> str:
    """Returns resume= of the command that began a run, from the field resumed_from of its first
    event; empty if it cannot be read."""
    try:
        with Folder.open(run) as folder, folder.open_file("events.jsonl") as file:
            first = json.loads(file.readline(_FIRST_EVENT_BYTES))
        return str(first["resumed_from"] or "")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _refuse_copy(config: Config, run: Path, now: TrainState) -> None:
    """Raises UserError if a complete job would be copied into another folder without training
    anything."""
    over = stop_reason(config, now)
    if over and config.run is not None and Path(config.run).expanduser().resolve() != run.resolve():
        fix = (
            "to train on: "
            f"{resume_command(config, run, f'run={config.run}', *further(config, now))}"
        )
        raise UserError(
            f"{run} is complete ({over}): there is nothing left to train in {config.run}",
            config.where("resume"),
            fix,
        )


def newest(run: Path, reading: Reading) -> GoodCheckpoint:
    """Returns the newest undamaged checkpoint of a run. Raises UserError if there is none."""
    return _first_good(run, files.finished(run)[::-1], reading)


def newest_good(
    run: Path,
    limit_bytes: int,
    *,
    mapped: bool = False,
    on_piece: Callable[[], None] = lambda: None,
) -> tuple[Checkpoint, Arrays, list[str]]:
    """Returns the newest undamaged checkpoint of a run, its arrays, and a line for each newer,
    damaged one.

    mapped, on_piece: as read_arrays(). Raises UserError if there is none.
    """
    found = newest(run, Reading(limit_bytes, mapped, on_piece))
    assert not isinstance(found.arrays, CheckpointInParts), "not asked for"
    return found.checkpoint, found.arrays, found.notes


def best(run: Path, reading: Reading) -> GoodCheckpoint | None:
    """Returns the undamaged checkpoint with the best objective; None if none was evaluated."""
    folders = files.finished(run)
    rated = prune.best(folders, len(folders))
    return _first_good(run, rated, reading) if rated else None


def _first_good(run: Path, folders: Sequence[Path], reading: Reading) -> GoodCheckpoint:
    notes: list[str] = []
    for folder in folders:
        try:
            found = files.read_numbers(folder)
            return GoodCheckpoint(found, reading.read(folder), notes)
        except Damaged as error:
            notes.append(
                f"damaged {folder.name} is skipped: "
                f"{error.what.removeprefix('the checkpoint is damaged: ')}"
            )
    if notes:
        fix = f"repair or remove {run / 'checkpoints'}; without it the job starts over"
        raise UserError(
            f"no checkpoint of {run} is good: {notes[0]}", str(run / "checkpoints"), fix
        )
    raise UserError(
        f"no checkpoint in {run}",
        "resume",
        "give the run folder: it has a folder checkpoints/step-...",
    )


def check_identity(found: Checkpoint, identity: Identity) -> None:
    """Raises UserError if a checkpoint belongs to another data set or another shuffle."""
    theirs = flat(found.identity)
    ours = flat(identity)
    if "data.tokenizer" not in theirs:  # from an earlier version; the tokens have a digest, too
        ours = {name: value for name, value in ours.items() if name != "data.tokenizer"}
    if "data.shuffle" in theirs:  # for blocks: a full shuffle of most sets has no name
        ours = {"data.shuffle": None, **ours}
    if all(theirs.get(name) == value for name, value in ours.items() if name not in _OF_INPUTS):
        _check_inputs(found, theirs, ours)
    for name, value in ours.items():
        if theirs.get(name) != value or (
            name == "data.samples" and found.train_state.progress.dataset != value
        ):
            same = (
                "the loss and metrics that the run began with"
                if name.startswith(_OF_OBJECTS)
                else _OF_CONFIG
            )
            fix = f"give {same}; or start another job: run=ANOTHER resume=no"
            before, now = _first_difference(theirs.get(name), value)
            what = (
                f"the checkpoint has another {name}: {before!r:.80}, but this job has {now!r:.80}"
            )
            raise UserError(what, str(found.folder), fix)


def _first_difference(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """Returns the first pair of entries that differ. Descends into lists of equal length; other
    values are returned whole."""
    if (
        isinstance(theirs, list)
        and isinstance(ours, list)
        and len(theirs) == len(ours)
        and len(repr(theirs)) > 80
    ):
        return next(
            (_first_difference(a, b) for a, b in zip(theirs, ours, strict=True) if a != b),
            (theirs, ours),
        )
    return theirs, ours


def _check_inputs(found: Checkpoint, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises UserError if only the checkpoint or only this job standardizes x: by task.standardize,
    or because a version had another default."""
    before, now = (_is_standardized(identity) for identity in (theirs, ours))
    if before != now:
        words = {True: "less its mean, over its deviation", False: "as the data have it"}
        what = (
            f"the model of the checkpoint was trained on x {words[before]}, but this job would "
            f"train it on x {words[now]}"
        )
        raise UserError(
            what,
            str(found.folder),
            f"resume=RUN task.standardize={str(before).lower()}; or start another job: "
            "run=ANOTHER resume=no",
        )


def _is_standardized(identity: Mapping[str, Any]) -> bool:
    means, deviations = (identity.get(name, number) for name, number in _OF_INPUTS.items())
    return not (np.all(np.equal(means, 0.0)) and np.all(np.equal(deviations, 1.0)))


def check_sums(found: Checkpoint, beginning: TrainState) -> None:
    """Raises UserError if the task's metrics have changed since the checkpoint."""
    theirs = found.train_state
    ours = beginning
    if theirs.sums.keys() != ours.sums.keys() or (theirs.objective, theirs.better) != (
        ours.objective,
        ours.better,
    ):
        what = (
            f"the checkpoint has the sums {', '.join(sorted(theirs.sums))} and the objective "
            f"{theirs.objective}, but this task has "
        )
        what += f"{', '.join(sorted(ours.sums))} and {ours.objective}"
        raise UserError(
            what, str(found.folder), "the task that the run started with, or another run="
        )

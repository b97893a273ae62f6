"""What a job resumes from: the newest good checkpoint of a run folder, if it belongs to this job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.read import read_file, resolve
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Progress
from hvdtrain.errors import UserError
from hvdtrain.events import redaction
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged, Identity
from hvdtrain.training.progress.train_state import TrainState

_NOT_COMPARED = ("run", "resume")  # where a job is, not what it is


class ResumePoint(NamedTuple):
    """What a job goes on from, as rank 0 has found it."""

    resumed: Path | None  # the run folder; None for a new job
    train_state: TrainState
    notes: list[str]  # lines for the user


def find_resume_point(config: Config, identity: Identity, total: int, limit_bytes: int) -> tuple[ResumePoint, Arrays | None]:
    """On rank 0: the state to resume from and its arrays, None for a new job; `total` samples are the whole job.

    Raises UserError where no checkpoint is good, or the newest good one is of another job.
    """
    run = former_run(config)
    if run is None:
        return ResumePoint(None, TrainState(Progress(identity["data"]["samples"], total)), []), None
    found, arrays, notes = newest_good(run, limit_bytes)
    check_identity(found, identity)
    train_state = dataclasses.replace(found.train_state, progress=dataclasses.replace(found.train_state.progress, total=total))
    if train_state.target != config.stop.target_accuracy:  # epochs at another target do not count
        train_state = dataclasses.replace(train_state, at_target=0)
    return ResumePoint(run, train_state, notes + changes(run, config)), arrays


def former_run(config: Config) -> Path | None:
    """The run folder to go on from: run's own once it has a checkpoint of this command, else resume's."""
    run = Path(config.run).expanduser() if config.run is not None else None
    if config.resume == "no":
        return None
    if run is not None and files.finished(run) and (config.resume == "auto" or _resumed(run) == config.resume):
        return run
    return None if config.resume == "auto" else Path(config.resume).expanduser()


def _resumed(run: Path) -> str:
    """resume= of the command that began a run; empty where that cannot be read."""
    try:
        return next((str(a.value) for a in read_file(str(run / "config.yaml")) if a.key == "resume"), "")
    except UserError:
        return ""


def newest_good(run: Path, limit_bytes: int) -> tuple[Checkpoint, Arrays, list[str]]:
    """The newest checkpoint of a run that is as it was written, its arrays, and a line for each newer one that is not.

    Raises UserError where there is none.
    """
    notes: list[str] = []
    for folder in reversed(files.finished(run)):
        try:
            found = files.read_numbers(folder)
            return found, files.read_arrays(folder, limit_bytes), notes
        except Damaged as error:
            notes.append(f"damaged {folder.name} is skipped: {error.what.removeprefix('the checkpoint is damaged: ')}")
    if notes:
        fix = f"repair or remove {run / 'checkpoints'}; without it the job starts over"
        raise UserError(f"no checkpoint of {run} is good: {notes[0]}", str(run / "checkpoints"), fix)
    raise UserError(f"no checkpoint in {run}", "resume", "give the run folder: it has a folder checkpoints/step-...")


def check_identity(found: Checkpoint, identity: Identity) -> None:
    """Raises UserError where a checkpoint is of another data set or another shuffle."""
    theirs = _flat(found.identity)
    for name, value in _flat(identity).items():
        if theirs.get(name) != value or (name == "data.samples" and found.train_state.progress.dataset != value):
            fix = "give the data and seed that the run folder's config.yaml names; or start another job: run=ANOTHER resume=no"
            what = f"the checkpoint has another {name}: {theirs.get(name)!r:.80}, this job has {value!r:.80}"
            raise UserError(what, str(found.folder), fix)


def changes(run: Path, config: Config) -> list[str]:
    """A line for each key that is not what the run's config.yaml says; secrets are hidden, since trackers keep these lines."""
    try:
        former = resolve(list(read_file(str(run / "config.yaml"))))
    except UserError as error:
        return [f"changed keys are unknown: {error.what}"]
    before, after = _flat(former.model_dump()), _flat(config.model_dump())
    shown_before, shown_after = redaction.redact(before), redaction.redact(after)
    return [
        f"changed {key}: {shown_before.get(key)} -> {shown_after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in _NOT_COMPARED
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"data.name": ..., "model.widths": ...}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat

"""What export takes from a run folder, which may be a stranger's: nothing in it is imported, built, unpickled or resolved."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdtrain.config.read import nearest, read_file
from hvdtrain.config.schema import ModelConfig
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.train.checkpoint import files
from hvdtrain.train.checkpoint.files import Checkpoint, Damaged

_NAME_LENGTH = 1000
_IMAGES = {"mean": "mean", "std": "std", "image_shape": "shape", "classes": "classes"}  # name in the file -> key of the identity's data
_STRANGE = "hvdtrain writes no such checkpoint: do not trust this run folder"


def read(run: Path, which: str) -> tuple[Checkpoint, Arrays, list[str]]:
    """The checkpoint that is asked for, its arrays, and a line for each damaged one that was skipped."""
    folders = files.finished(run)
    if not folders:
        raise UserError(f"no checkpoint in {run}", "RUN", "give the run folder: it has a folder checkpoints/step-...")
    if which == "newest":
        return _first_good(run, reversed(folders), [])
    if which == "best":
        return _first_good(run, *_by_accuracy(run, folders))
    for folder in folders:
        if folder.name == which:
            return *_load(folder), []
    raise UserError(f"{run} has no checkpoint {which}", "--checkpoint", nearest(which, ["newest", "best", *(f.name for f in folders)]))


def _first_good(run: Path, folders: Iterable[Path], notes: list[str]) -> tuple[Checkpoint, Arrays, list[str]]:
    for folder in folders:
        try:
            return *_load(folder), notes
        except Damaged as error:
            notes.append(_skipped(folder, error))
    raise UserError(f"no checkpoint of {run} is good: {notes[0]}", str(run / "checkpoints"), "mend its files from a copy of the run folder")


def _by_accuracy(run: Path, folders: list[Path]) -> tuple[list[Path], list[str]]:
    """Those whose own step was evaluated, the best first, the earlier first among equals; a line for each that cannot be read."""
    rated, notes = [], []
    for folder in folders:
        try:
            train_state = files.read_numbers(folder).train_state
        except Damaged as error:
            notes.append(_skipped(folder, error))
            continue
        if train_state.evaluated == train_state.progress.step and not math.isnan(train_state.accuracy):
            rated.append((-train_state.accuracy, train_state.progress.step, folder))
    if not rated:
        what = "; ".join([f"no checkpoint of {run} was evaluated at its own step", *notes])
        raise UserError(what, "--checkpoint best", "--checkpoint newest")
    return [folder for *_, folder in sorted(rated)], notes


def _skipped(folder: Path, error: Damaged) -> str:
    return f"damaged {folder.name} is skipped: {error.what.removeprefix('the checkpoint is damaged: ')}"


def _load(folder: Path) -> tuple[Checkpoint, Arrays]:
    """Damaged where it is not as it was written. Its slots are read too: every file has its checksum."""
    found, memory, needed = files.read_numbers(folder), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    with contextlib.suppress(OSError):  # told by the one who reads it
        needed = sum((folder / name).stat().st_size for name in files.ARRAYS)
    if needed > memory:
        what = f"the checkpoint has {needed:,} bytes, this machine {memory:,} bytes of memory"
        raise UserError(what, str(folder), "export it on a machine with more memory")
    return found, files.read_arrays(folder, memory)


def own_names(arrays: Arrays, found: Checkpoint) -> Arrays:
    """Weights and buffers as the model names them; a UserError for names that no model of ours has."""
    if found.names:
        if not all(_is_sound(name) and array in arrays and array[:2] in ("p.", "b.") for name, array in found.names.items()):
            raise UserError("the checkpoint publishes names that it has not, or that are none", str(found.folder), _STRANGE)
        return {name: arrays[array] for name, array in found.names.items()}
    weights: Arrays = {}
    folder = found.folder
    for full, array in arrays.items():
        kind, _, name = full.partition(".")
        if kind == "s":
            continue
        if kind not in ("p", "b") or not _is_sound(name):
            raise UserError(f"the checkpoint has an array named {full!r:.100}", str(folder), _STRANGE)
        if name in weights:
            raise UserError(f"the checkpoint has a weight and a buffer that are both named {name!r:.100}", str(folder), _STRANGE)
        weights[name] = array
    if not weights:
        raise UserError("the checkpoint has no weights", str(folder), _STRANGE)
    return weights


def _is_sound(name: str) -> bool:
    """No path that leaves its folder, nothing that a terminal obeys, and not the name under which safetensors keeps the metadata."""
    parts = re.split(r"[/\\]", name)  # a user's modules may have a slash in their names
    return name.isprintable() and len(name) <= _NAME_LENGTH and name != "__metadata__" and not {"", ".", ".."} & set(parts)


def about(run: Path, found: Checkpoint) -> tuple[dict[str, str], list[str]]:
    """What the file tells of itself, as safetensors has it: text by name; and lines for the user."""
    model, notes = _model(run / "config.yaml")
    data, train_state = found.identity.get("data"), found.train_state
    known = {name: data.get(key) for name, key in _IMAGES.items()} if isinstance(data, dict) else {}
    images = {name: json.dumps(value) for name, value in known.items() if _is_numbers(value)}
    far = {"step": str(train_state.progress.step), "epochs": str(train_state.progress.epochs)}
    if not math.isnan(train_state.accuracy):
        far |= {"accuracy": str(train_state.accuracy), "accuracy_of_step": str(train_state.evaluated)}
    return model | images | far, notes


def _is_numbers(value: Any) -> bool:
    """A number or a list of them."""
    return all(type(number) in (int, float) for number in (value if isinstance(value, list) else [value]))


def _model(path: Path) -> tuple[dict[str, str], list[str]]:
    """The framework, and the model's name and options; a line where they cannot be read, since weights alone are enough for many."""
    try:
        given = {assignment.key: assignment.value for assignment in read_file(str(path))}  # bounded, and no code
        name, framework = given["model.name"], given["framework"]
    except (UserError, KeyError) as error:
        why = error.what if isinstance(error, UserError) else f"it has no {error.args[0]}"
        printable = "".join(letter if letter.isprintable() else "?" for letter in why[:200])
        return {}, [f"the model's name stays unknown: config.yaml: {printable}"]
    own = {f"model.{name}" for name in ModelConfig.model_fields}
    options = {key.removeprefix("model."): value for key, value in given.items() if key.startswith("model.") and key not in own}
    return {"framework": str(framework), "model": json.dumps({"name": name, "options": options}, default=str)}, []

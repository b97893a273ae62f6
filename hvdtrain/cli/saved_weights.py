"""The weights of a run's checkpoint, and what an exported file states about them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.read import read_run_config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.arrays import Arrays
from hvdtrain.data.input_encoding import FILE, encoding_of_run
from hvdtrain.errors import UserError, nearest
from hvdtrain.features.optim import EMA
from hvdtrain.optim.weight_average import averages
from hvdtrain.tasks.several_inputs import transforms_of_facts
from hvdtrain.tasks.transform import Transforms, transform_of_facts
from hvdtrain.training.checkpoint import files, prune
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged
from hvdtrain.training.checkpoint.ranges import CheckpointInParts
from hvdtrain.training.checkpoint.resume import GoodCheckpoint, Reading

_LONGEST_NAME = 1000
# name in the file -> key of identity["data"]
_DATA_KEYS = {
    "mean": "mean",
    "std": "std",
    "image_shape": "shape",
    "classes": "classes",
}
_DO_NOT_TRUST = "hvdtrain writes no such checkpoint: do not trust this run folder"


class LoadedCheckpoint(NamedTuple):
    checkpoint: Checkpoint
    arrays: Arrays
    notes: list[str]  # for people: damaged checkpoints that were skipped


class Metadata(NamedTuple):
    fields: dict[str, str]  # metadata fields, as in safetensors
    notes: list[str]  # for people: unknown values


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
        which = "best" if _is_set(run, "stop.restore_best") and prune.best(folders, 1) else "newest"
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


def model_state(arrays: Arrays, checkpoint: Checkpoint) -> Arrays:
    """Returns weights and buffers under the names of the model's state_dict. Raises UserError for
    names that no model can have."""
    folder = str(checkpoint.folder)
    if checkpoint.names:
        for name, array_name in checkpoint.names.items():
            if not (_is_valid(name) and array_name in arrays and array_name[:2] in ("p.", "b.")):
                raise UserError(
                    "the checkpoint lists names of arrays that are missing, or invalid names",
                    folder,
                    _DO_NOT_TRUST,
                )
        return {name: arrays[array_name] for name, array_name in checkpoint.names.items()}
    state: Arrays = {}
    for full_name, array in arrays.items():
        kind, _, name = full_name.partition(".")
        if kind == "s":  # optimizer state
            continue
        if kind not in ("p", "b") or not _is_valid(name):
            raise UserError(
                f"the checkpoint has an array named {full_name!r:.100}", folder, _DO_NOT_TRUST
            )
        if name in state:
            raise UserError(
                f"the checkpoint has a weight and a buffer that are both named {name!r:.100}",
                folder,
                _DO_NOT_TRUST,
            )
        state[name] = array
    if not state:
        raise UserError("the checkpoint has no weights", folder, _DO_NOT_TRUST)
    return state


def has_averages(run: Path) -> bool:
    """Whether the run has averages of its weights (optim.ema), as far as its config.yaml can be
    read."""
    return _is_set(run, EMA.key)


def _is_set(run: Path, key: str) -> bool:
    """Whether a key of the run is neither null nor false."""
    with contextlib.suppress(UserError):
        return any(
            assignment.key == key and assignment.value not in (None, False)
            for assignment in read_run_config(run)
        )
    return False


def with_averages(arrays: Arrays) -> Arrays:
    """Returns the arrays with each averaged weight replaced by its average."""
    averaged = averages(arrays)
    return arrays | {
        name: array
        for name, array in averaged.items()
        if name in arrays and array.shape == arrays[name].shape
    }


def _is_valid(name: str) -> bool:
    """Whether a name has no path out of its folder, no control codes, and is not the name that
    safetensors uses for metadata."""
    parts = re.split(r"[/\\]", name)  # a user's modules may have a slash in their names
    return (
        name.isprintable()
        and len(name) <= _LONGEST_NAME
        and name != "__metadata__"
        and not {"", ".", ".."} & set(parts)
    )


def metadata(run: Path, checkpoint: Checkpoint) -> Metadata:
    """Returns the metadata of an exported file: model, framework, data, progress and accuracy, as
    far as they are known."""
    model = _model(run)
    data = checkpoint.identity.get("data")
    values = (
        {name: data.get(key) for name, key in _DATA_KEYS.items()} if isinstance(data, dict) else {}
    )
    inputs = {
        name: json.dumps(value) for name, value in values.items() if _is_number_or_numbers(value)
    }
    if isinstance(data, dict) and isinstance(data.get("task"), str):  # else it is classification
        inputs = {"task": f"{data['task']:.200}", "data": json.dumps(data)[:_LONGEST_NAME]}
    if isinstance(data, dict):
        of_x = _inputs(data)
        has_own = "dtype" in of_x or "inputs" in data
        inputs = {
            name: value
            for name, value in inputs.items()
            if not has_own or name not in ("mean", "std", "image_shape")
        } | of_x
    train_state = checkpoint.train_state
    progress = {"step": str(train_state.progress.step), "epochs": str(train_state.progress.epochs)}
    if not math.isnan(train_state.last):
        name = train_state.objective
        progress |= {name: str(train_state.last), f"{name}_of_step": str(train_state.evaluated)}
    columns = _columns(run)
    return Metadata(
        model.fields | inputs | progress | columns.fields, [*model.notes, *columns.notes]
    )


def _columns(run: Path) -> Metadata:
    """Returns the encoding of the columns of the run's table, as JSON; nothing if they are
    numbers."""
    try:
        encoding = encoding_of_run(run)
    except UserError as error:
        return Metadata({}, [f"what the columns become is unknown: {FILE}: {error.what[:200]}"])
    return Metadata({} if encoding is None else {"columns": encoding.to_json().decode()}, [])


def _inputs(data: dict[str, Any]) -> dict[str, str]:
    """Returns the formula of the model's input and its numbers; nothing if the task is not
    hvdtrain's, or if the checkpoint lacks them."""
    task = data.get("task", "classification")
    if task not in ("classification", "multilabel", "segmentation", "regression") and not (
        isinstance(task, str) and is_object(task)
    ):
        return {}
    try:
        if "inputs" in data:
            return _several_inputs(transforms_of_facts(data))
        transform = transform_of_facts(data)
    except (KeyError, TypeError, ValueError, OverflowError):
        return {}
    of_x = (
        {}
        if transform.is_of_images
        else {"dtype": transform.x.dtype, "shape": json.dumps(transform.x.shape)}
    )
    numbers = {
        "mean": json.dumps(transform.mean.tolist()),
        "std": json.dumps(transform.std.tolist()),
    }
    return {
        "inputs": transform.formula,
        **of_x,
        **(numbers if transform.is_standardized or transform.is_of_images else {}),
        **({} if transform.channels == "last" else {"channels": transform.channels}),
        **({} if transform.fill is None else {"missing": json.dumps(transform.fill.tolist())}),
    }


def _several_inputs(transforms: Transforms) -> dict[str, str]:
    """Returns the transform of each input field, as JSON."""
    fields = {
        name: {
            "inputs": of.formula,
            "dtype": of.x.dtype,
            "shape": of.x.shape,
            "mean": of.mean.tolist(),
            "std": of.std.tolist(),
        }
        for name, of in transforms.each.items()
    }
    return {"inputs": json.dumps(fields)}


def _is_number_or_numbers(value: Any) -> bool:
    """Whether a value is a number or a list of numbers."""
    return all(
        type(number) in (int, float) for number in (value if isinstance(value, list) else [value])
    )


def _model(run: Path) -> Metadata:
    """Returns the framework, and the model's name and options; only a note if config.yaml cannot be
    read, because the weights are still worth exporting."""
    try:
        # bounded in size; runs no code
        config = {assignment.key: assignment.value for assignment in read_run_config(run)}
        name = config["model.name"]
        framework = config["framework"]
    except (UserError, KeyError) as error:
        why = error.what if isinstance(error, UserError) else f"it has no {error.args[0]}"
        printable = "".join(letter if letter.isprintable() else "?" for letter in why[:200])
        return Metadata({}, [f"the model's name is unknown: config.yaml: {printable}"])
    declared = {f"model.{key}" for key in ModelConfig.model_fields}
    options = {
        key.removeprefix("model."): value
        for key, value in config.items()
        if key.startswith("model.") and key not in declared
    }
    names = config.get("data.class_names")
    is_list_of_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    class_names = {"class_names": json.dumps(names)} if is_list_of_names else {}
    return Metadata(
        class_names
        | {
            "framework": str(framework),
            "model": json.dumps({"name": name, "options": options}, default=str),
        },
        [],
    )

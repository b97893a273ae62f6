"""hvdtrain export --to model.safetensors or model.pt: the weights of a checkpoint in a file of
their own, for other software."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.config.read import expand, read_run_config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.adapters import merged, scale_of
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.folder import Folder
from hvdtrain.errors import DONE, UserError, nearest
from hvdtrain.optim.around import averages
from hvdtrain.tasks.several_inputs import transforms_of_facts
from hvdtrain.tasks.transform import Transforms, transform_of_facts
from hvdtrain.training.checkpoint import files, prune
from hvdtrain.training.checkpoint.array_file import write_arrays
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.version import __version__

USAGE = """\
hvdtrain export RUN --to FILE [--checkpoint newest] [--merged] [--force]
  RUN            the run folder, which has checkpoints/
  --to           the file to write: model.safetensors, model.pt for torch.load, or of framework=keras model.keras, where
                 model.name=package.module:function behind it makes the model
  --checkpoint   newest, best (by the task's objective), or the name of one: step-00000120; default: newest, and of a run with
                 stop.restore_best best
  --merged       of a run with model.lora: its adapters are merged into the weights of their layers
  --force        overwrite FILE if it exists"""  # noqa: E501
_WIDTH = 120  # letters of mean and std on the screen
_SYNTAX = USAGE.partition("\n")[0]


def export(arguments: Sequence[str]) -> int:
    """Runs `export` of weights; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    options = parse(arguments)
    run = expand(options.run, "RUN")
    to = expand(options.to, "--to")
    check_target(to, options.force)
    checkpoint, arrays, skipped = read_checkpoint(run, options.checkpoint)
    notes_of_average: list[str] = []
    if has_averages(run) and checkpoint.train_state.progress.step:
        arrays = with_averages(arrays)
        notes_of_average = ["the averages of the weights are written (optim.ema of the run)"]
    weights = model_state(arrays, checkpoint)
    weights = _without_adapters(weights, run, options.merged)
    fields, notes = metadata(run, checkpoint)
    size_bytes = _write(to, weights, {"format": "pt", "hvdtrain": __version__} | fields)
    numbers = sum(array.size for array in weights.values())
    sizes = f"{len(weights)} arrays, {numbers:,} numbers, {size_bytes / 1e6:,.1f} MB"
    written = (
        f"{checkpoint.folder.name} of {run} ({_progress(checkpoint.train_state)}) -> {to}: {sizes}"
    )
    print("\n".join([*skipped, *notes, *notes_of_average, written, *_how_to_load(to, fields)]))
    return DONE


def _without_adapters(weights: Arrays, run: Path, is_asked: bool) -> Arrays:
    """With the adapters of model.lora merged into the weights of their layers.

    Raises UserError where there are some and is_asked is false, or the other way round.
    """
    scale = scale_of(_run_config(run))
    if scale is None and is_asked:
        raise UserError(
            f"{run} has no adapters", "--merged", "leave --merged out: they come of model.lora"
        )
    if scale is not None and not is_asked:
        what = f"{run} has adapters (model.lora), without which its weights are another model"
        raise UserError(
            what, "command line of export", "--merged puts them into the weights of their layers"
        )
    return weights if scale is None else merged(weights, scale)


def _run_config(run: Path) -> dict[str, Any]:
    """Values by key; nothing where config.yaml cannot be read, as _model() tells."""
    with contextlib.suppress(UserError):
        return {one.key: one.value for one in read_run_config(run)}
    return {}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises UserError where the command line is not as USAGE says."""
    parser = CommandParser("export", _SYNTAX)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--to")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--force", action="store_true")
    options, unknown = parser.parse_known_args(arguments)
    options.words = [
        word for word in unknown if word.startswith("model.") and str(options.to).endswith(".keras")
    ]
    unknown = [word for word in unknown if word not in options.words]
    if unknown:
        suggestion = nearest(
            unknown[0].partition("=")[0], ["--to", "--checkpoint", "--merged", "--force"]
        )
        raise UserError(
            f"unknown argument '{unknown[0]}'", "command line of export", f"{suggestion}; {_SYNTAX}"
        )
    for name, value in {"RUN": options.run, "--to": options.to}.items():
        if value is None:
            raise UserError(f"{name} is missing", "command line of export", _SYNTAX)
    return options


def check_target(to: Path, force: bool) -> None:
    """Raises UserError where the file cannot be written; called before the checkpoint is read."""
    if to.suffix not in (".safetensors", ".pt", ".keras"):
        raise UserError(
            f"{to} ends neither in .safetensors nor in .pt or .keras",
            "--to",
            "as in --to model.safetensors",
        )
    if not os.path.isdir(to.parent):  # unlike Path.is_dir, False where permission is lacking
        raise UserError(f"there is no folder {to.parent}", "--to", f"mkdir -p {to.parent}")
    if os.path.isdir(to):
        raise UserError(f"{to} is a folder", "--to", "give the name of a file")
    if os.path.lexists(to) and not force:
        raise UserError(
            f"{to} exists already", "--to", "--force overwrites it; or give another name"
        )


def _write(to: Path, weights: Arrays, fields: dict[str, str]) -> int:
    """Writes the file, or leaves it as it was and raises UserError; returns its size in bytes.

    A .pt file is a plain state_dict, without the metadata `fields`.
    """
    try:
        with Folder.open(to.parent) as folder, folder.replacing(to.name) as file:
            if to.suffix == ".pt":
                from hvdtrain.frameworks.torch.state import save_state_dict

                save_state_dict(weights, file)
            else:
                write_arrays(file, weights, fields)
            return file.tell()
    except OSError as error:
        raise UserError(
            f"cannot write {to}: {error.strerror or error}",
            "--to",
            "give a folder that can be written and has room",
        ) from None


def _progress(train_state: TrainState) -> str:
    """epoch 15.00, validation accuracy 0.7500 of step 20"""
    epochs = f"epoch {train_state.progress.epochs:.2f}"
    if math.isnan(train_state.last):
        return f"{epochs}, not evaluated yet"
    of_step = (
        ""
        if train_state.evaluated == train_state.progress.step
        else f" of step {train_state.evaluated}"
    )
    return f"{epochs}, validation {train_state.objective} {train_state.last:.4f}{of_step}"


def _input(fields: dict[str, str]) -> str:
    """What the model is called with."""
    if fields.get("inputs", "").startswith("{"):  # of several inputs
        return "; ".join(
            _input_of_field(name, of) for name, of in json.loads(fields["inputs"]).items()
        )
    if "dtype" in fields:  # of numbers that are not images
        of_x = f"x {fields['dtype']} {fields['shape']:.200} as the data have it"
        if "mean" not in fields:
            return of_x
        return (
            f"{fields['inputs']}, by the last axis: mean {_cut(fields['mean'])}, std "
            f"{_cut(fields['std'])}, {of_x}"
        )
    if "task" in fields and "inputs" not in fields:
        return f"of task.name={fields['task']:.200}: {fields.get('data', 'unknown'):.400}"
    data = [
        f"{name} {fields.get(name, 'unknown'):.200}"
        for name in ("mean", "std", "image_shape", "classes")
    ]
    if "class_names" in fields:
        data.append(f"named {fields['class_names']:.200}")
    return f"{fields.get('inputs', '(pixels / 255 - mean) / std')}: {', '.join(data)}"


def _input_of_field(name: str, field: dict[str, Any]) -> str:
    numbers = [
        f"{key} {_cut(json.dumps(field[key]))}" for key in ("mean", "std") if key in field["inputs"]
    ]
    return ", ".join([f"{name}: {field['inputs']}", *numbers, f"{field['dtype']} {field['shape']}"])


def _cut(numbers: str) -> str:
    """The first of many; the file has all."""
    return numbers if len(numbers) <= _WIDTH else f"{numbers[:_WIDTH]} ..."


def _how_to_load(to: Path, fields: dict[str, str]) -> list[str]:
    """Lines for people: the model, its input, and two lines of Python that load the file."""
    lines = []
    if "model" in fields:
        lines.append(f"model    {fields['model']:.500} of framework {fields['framework']!r:.20}")
    lines.append(f"input    {_input(fields)}")
    path = json.dumps(str(to))
    for_torch = fields.get("framework", "torch") == "torch"
    if to.suffix == ".pt":
        imports = "import torch"
        weights = f"torch.load({path}, weights_only=True)"
    else:
        imports = f"from safetensors.{'torch' if for_torch else 'numpy'} import load_file"
        weights = f"load_file({path})"
    load = f"model.load_state_dict({weights})" if for_torch else f"weights = {weights}"
    return [*lines, f"load it  {imports}", f"         {load}"]


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
    fields: dict[str, str]  # as safetensors stores them
    notes: list[str]  # for people: what is not known


def read_checkpoint(
    run: Path, which: str, *, mapped: bool = False, on_piece: Callable[[], None] = lambda: None
) -> LoadedCheckpoint:
    """Reads the checkpoint `which` of a run: newest, best, or its name; empty: the one whose
    weights are the result of the run.

    For newest and best damaged ones are skipped.

    mapped: its weights alone, where they lie on the disk: then the checkpoint may have more bytes
    than this machine has memory. on_piece: as files.read_arrays(). Raises UserError where there is
    none, Damaged where the one that is named is damaged.
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
        return _first_undamaged(run, reversed(folders), [], mapped, on_piece)
    if which == "best":
        best_first, notes = _best_first(run, folders)
        return _first_undamaged(run, best_first, notes, mapped, on_piece)
    for folder in folders:
        if folder.name == which:
            return _load(folder, [], mapped, on_piece)
    raise UserError(
        f"{run} has no checkpoint {which}",
        "--checkpoint",
        nearest(which, ["newest", "best", *(f.name for f in folders)]),
    )


def _first_undamaged(
    run: Path, folders: Iterable[Path], notes: list[str], mapped: bool, on_piece: Callable[[], None]
) -> LoadedCheckpoint:
    for folder in folders:
        try:
            return _load(folder, notes, mapped, on_piece)
        except Damaged as error:
            notes.append(_skipped(folder, error))
    what = f"no checkpoint of {run} is good: {notes[0]}"
    raise UserError(
        what, str(run / "checkpoints"), "restore its files from a copy of the run folder"
    )


def _best_first(run: Path, folders: list[Path]) -> tuple[list[Path], list[str]]:
    """Checkpoints that were evaluated at their own step, the best first, of equals the earlier; and
    a note for each damaged one."""
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


def _load(
    folder: Path, notes: list[str], mapped: bool, on_piece: Callable[[], None]
) -> LoadedCheckpoint:
    """Every file is compared with its checksum, that of the optimizer's state too. Raises Damaged,
    UserError."""
    checkpoint = files.read_numbers(folder)
    if mapped:
        return LoadedCheckpoint(
            checkpoint,
            files.read_arrays(
                folder, sys.maxsize, files.ARRAYS[:1], mapped=True, on_piece=on_piece
            ),
            notes,
        )
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
    return LoadedCheckpoint(
        checkpoint, files.read_arrays(folder, memory_bytes, on_piece=on_piece), notes
    )


def model_state(arrays: Arrays, checkpoint: Checkpoint) -> Arrays:
    """Weights and buffers under the names of the model's state_dict. Raises UserError for names
    that no model can have."""
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
        if kind == "s":  # of the optimizer
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
    return _is_set(run, "optim.ema")


def _is_set(run: Path, key: str) -> bool:
    """Whether a key of the run is neither null nor false."""
    with contextlib.suppress(UserError):
        return any(
            assignment.key == key and assignment.value not in (None, False)
            for assignment in read_run_config(run)
        )
    return False


def with_averages(arrays: Arrays) -> Arrays:
    """The averages in the place of the weights that they are of."""
    found = averages(arrays)
    return arrays | {
        name: array
        for name, array in found.items()
        if name in arrays and array.shape == arrays[name].shape
    }


def _is_valid(name: str) -> bool:
    """No path that leaves its folder, no control codes, and not the name under which safetensors
    stores the metadata."""
    parts = re.split(r"[/\\]", name)  # a user's modules may have a slash in their names
    return (
        name.isprintable()
        and len(name) <= _LONGEST_NAME
        and name != "__metadata__"
        and not {"", ".", ".."} & set(parts)
    )


def metadata(run: Path, checkpoint: Checkpoint) -> Metadata:
    """What the exported file states about itself: model, framework, data, progress and accuracy, as
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
    return Metadata(model.fields | inputs | progress, model.notes)


def _inputs(data: dict[str, Any]) -> dict[str, str]:
    """The formula of what the model gets, and its numbers; nothing where the task is not
    hvdtrain's, or the checkpoint does not say it."""
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
    }


def _several_inputs(transforms: Transforms) -> dict[str, str]:
    """What the model gets of each field, as JSON."""
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
    """A number or a list of numbers."""
    return all(
        type(number) in (int, float) for number in (value if isinstance(value, list) else [value])
    )


def _model(run: Path) -> Metadata:
    """The framework, and the model's name and options; a note where config.yaml cannot be read: the
    weights alone are worth exporting."""
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

"""hvdtrain export --to model.safetensors or model.pt: writes the weights of a checkpoint to a
separate file, for other software."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cli.options import CommandParser
from hvdtrain.config.read import expand, read_run_config
from hvdtrain.core.adapters import merged, scale_of
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.folder import Folder
from hvdtrain.errors import DONE, UserError, nearest
from hvdtrain.extras.export.metadata import has_averages, metadata, model_state, with_averages
from hvdtrain.extras.trained_models.saved_weights import read_checkpoint
from hvdtrain.features.optim import AVERAGES_WRITTEN
from hvdtrain.training.checkpoint.array_file import write_arrays
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.version import __version__

USAGE = """\
hvdtrain export RUN --to FILE|FOLDER [--checkpoint newest] [--adapters merged|separate] [--force]
  RUN            the run folder, which has checkpoints/
  --to           the file to write: model.safetensors, model.pt for torch.load, or of framework=keras model.keras, where
                 model.name=package.module:function behind it makes the model; or of model.name=transformers:FOLDER, which
                 follows RUN, a folder for from_pretrained(): configuration, weights, and the tokenizer of the run; of
                 framework=torch model.pt2 (torch.export) or model.onnx, which compute without the model's code, for a
                 batch of any size; model.name=package.module:Class of the run is repeated behind it
  --checkpoint   newest, best (by the task's objective), or the name of one: step-00000120; default: newest, and of a run with
                 stop.restore_best best
  --adapters     of a run with model.lora: merged into the weights of their layers (--merged), or in a folder separate, for PEFT
  --force        overwrite FILE, or what an earlier export has written into FOLDER"""  # noqa: E501
OF_GRAPHS = (".onnx", ".pt2")  # files that contain the computation
_WIDTH = 120  # characters of mean and std on the screen
# begin the arguments that repeat the run's import paths, where its model is built
_OF_CODE = ("model.", "task.")
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
        notes_of_average = [AVERAGES_WRITTEN]
    weights = model_state(arrays, checkpoint)
    weights = _without_adapters(weights, run, options.adapters)
    fields, notes = metadata(run, checkpoint)
    size_bytes = _write(to, weights, {"format": "pt", "hvdtrain": __version__} | fields)
    numbers = sum(array.size for array in weights.values())
    sizes = f"{len(weights)} arrays, {numbers:,} numbers, {size_bytes / 1e6:,.1f} MB"
    written = (
        f"{checkpoint.folder.name} of {run} ({_progress(checkpoint.train_state)}) -> {to}: {sizes}"
    )
    print("\n".join([*skipped, *notes, *notes_of_average, written, *_how_to_load(to, fields)]))
    return DONE


def _without_adapters(weights: Arrays, run: Path, adapters: str | None) -> Arrays:
    """Returns the weights with the adapters of model.lora merged into their layers.

    Raises UserError if there are adapters and they are not asked to be merged, or the reverse.
    """
    scale = scale_of(_run_config(run))
    if scale is None and adapters is not None:
        raise UserError(
            f"{run} has no adapters",
            "--merged" if adapters == "merged" else "--adapters",
            f"leave --{adapters if adapters == 'merged' else 'adapters'} out: only a run with "
            "model.lora has adapters",
        )
    if scale is not None and adapters is None:
        what = f"{run} has adapters (model.lora); its weights without them are a different model"
        raise UserError(what, "command line of export", "--merged merges them into the weights")
    if adapters == "separate":
        what = "--adapters separate writes a folder for PEFT, but --to names a file"
        raise UserError(what, "--adapters", "--to FOLDER; or --adapters merged")
    return weights if scale is None else merged(weights, scale)


def _run_config(run: Path) -> dict[str, Any]:
    """Returns values by key; nothing if config.yaml cannot be read, which _model() reports."""
    with contextlib.suppress(UserError):
        return {one.key: one.value for one in read_run_config(run)}
    return {}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. Raises UserError if it does not match USAGE."""
    parser = CommandParser("export", _SYNTAX)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--to")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--adapters", choices=["merged", "separate"])
    parser.add_argument("--force", action="store_true")
    options, unknown = parser.parse_known_args(arguments)
    is_built = not str(options.to).endswith((".safetensors", ".pt"))
    options.words = [word for word in unknown if word.startswith(_OF_CODE) and is_built]
    unknown = [word for word in unknown if word not in options.words]
    if unknown:
        suggestion = nearest(
            unknown[0].partition("=")[0],
            ["--to", "--checkpoint", "--adapters", "--merged", "--force"],
        )
        raise UserError(
            f"unknown argument '{unknown[0]}'", "command line of export", f"{suggestion}; {_SYNTAX}"
        )
    for name, value in {"RUN": options.run, "--to": options.to}.items():
        if value is None:
            raise UserError(f"{name} is missing", "command line of export", _SYNTAX)
    if options.merged and options.adapters == "separate":
        what = "--merged and --adapters separate contradict each other"
        raise UserError(what, "command line of export", "one of them")
    options.adapters = "merged" if options.merged else options.adapters
    return options


def check_target(to: Path, force: bool) -> None:
    """Raises UserError if the file cannot be written; called before the checkpoint is read."""
    *ends, last = [".pt", ".keras", *OF_GRAPHS]
    if to.suffix not in (".safetensors", *ends, last):
        raise UserError(
            f"{to} ends neither in .safetensors nor in {', '.join(ends)} or {last}",
            "--to",
            "as in --to model.safetensors",
        )
    if not os.path.isdir(to.parent):  # unlike Path.is_dir, False if permission is lacking
        raise UserError(f"there is no folder {to.parent}", "--to", f"mkdir -p {to.parent}")
    if os.path.isdir(to):
        raise UserError(f"{to} is a folder", "--to", "give the name of a file")
    if os.path.lexists(to) and not force:
        raise UserError(
            f"{to} exists already", "--to", "--force overwrites it; or give another name"
        )


def _write(to: Path, weights: Arrays, fields: dict[str, str]) -> int:
    """Writes the file and returns its size in bytes, or raises UserError and leaves the file
    unchanged.

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
    """Formats a checkpoint: epoch 15.00, validation accuracy 0.7500 of step 20."""
    epochs = f"epoch {train_state.progress.epochs:.2f}"
    if math.isnan(train_state.last):
        return f"{epochs}, not evaluated yet"
    of_step = (
        ""
        if train_state.evaluated == train_state.progress.step
        else f" of step {train_state.evaluated}"
    )
    return f"{epochs}, validation {train_state.objective} {train_state.last:.4f}{of_step}"


# what a mean is of, by Transform.channels
_AXES = {"last": "the last axis", "first": "the first axis", "none": "all numbers together"}


def _input(fields: dict[str, str]) -> str:
    """Formats the inputs of the model."""
    if fields.get("inputs", "").startswith("{"):  # several inputs
        return "; ".join(
            _input_of_field(name, of) for name, of in json.loads(fields["inputs"]).items()
        )
    if "dtype" in fields:  # numbers that are not images
        of_x = f"x {fields['dtype']} {fields['shape']:.200} as the data have it"
        if "missing" in fields:
            of_x += f", with {_cut(fields['missing'])} in place of NaN"
        if "mean" not in fields:
            return of_x
        axis = _AXES.get(fields.get("channels", "last"), "the last axis")
        return (
            f"{fields['inputs']}, by {axis}: mean {_cut(fields['mean'])}, std "
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
    """Shortens a long list to its first entries; the file contains all of them."""
    return numbers if len(numbers) <= _WIDTH else f"{numbers[:_WIDTH]} ..."


def lines_of_fields(fields: dict[str, str]) -> list[str]:
    """Returns lines for people: the model and its input."""
    lines = []
    if "model" in fields:
        lines.append(f"model    {fields['model']:.500} of framework {fields['framework']!r:.20}")
    return [*lines, f"input    {_input(fields)}"]


def _how_to_load(to: Path, fields: dict[str, str]) -> list[str]:
    """Returns lines for people: the model, its input, and two lines of Python that load the
    file."""
    lines = lines_of_fields(fields)
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

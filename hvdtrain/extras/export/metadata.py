"""The weights of a checkpoint by the names of the model, and what an exported file states about
them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.read import read_run_config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.arrays import Arrays
from hvdtrain.data.input_encoding import FILE, encoding_of_run
from hvdtrain.errors import UserError
from hvdtrain.extras.trained_models.saved_weights import is_set
from hvdtrain.features.optim import EMA
from hvdtrain.optim.weight_average import averages
from hvdtrain.tasks.several_inputs import transforms_of_facts
from hvdtrain.tasks.transform import Transforms, transform_of_facts
from hvdtrain.training.checkpoint.files import Checkpoint

_LONGEST_NAME = 1000
# name in the file -> key of identity["data"]
_DATA_KEYS = {
    "mean": "mean",
    "std": "std",
    "image_shape": "shape",
    "classes": "classes",
}
_DO_NOT_TRUST = "hvdtrain writes no such checkpoint: do not trust this run folder"


class Metadata(NamedTuple):
    fields: dict[str, str]  # metadata fields, as in safetensors
    notes: list[str]  # for people: unknown values


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
    return is_set(run, EMA.key)


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

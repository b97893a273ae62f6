"""Pretrained weights: loads the arrays of the file or folder in model.weights instead of the
model's initial weights."""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import long_on_rank_0, on_rank_0
from hvdtrain.config.read import read_run_config
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.core.adapters import is_adapter, scale_of
from hvdtrain.core.arrays import Readable, in_memory, pieces_of
from hvdtrain.core.folder import check_regular
from hvdtrain.core.ties import Ties, check_equal
from hvdtrain.errors import UserError, first_line, short
from hvdtrain.extras.pretrained.leftovers import (
    check_leftovers,
    check_missing,
    with_adapters,
    without_wrappers,
)
from hvdtrain.extras.pretrained.weights_on_all_ranks import (
    WeightPlace,
    WrongWeights,
    load_own_elements,
    why_one_rank_reads,
)
from hvdtrain.features.optim import EMA
from hvdtrain.frameworks.learner import Learner, plain_names
from hvdtrain.optim.weight_average import averages
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.array_file import map_unconverted
from hvdtrain.training.checkpoint.resume import newest_good
from hvdtrain.training.pretrained import Loaded
from hvdtrain.training.replicas.broadcast import broadcast_state

# keys under which torch files store weights next to other data
_INSIDE = (
    "state_dict",
    "model",
    "model_state_dict",
)
_OF_HUGGING_FACE = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
_KNOWN = "model.safetensors, model.pt, a run folder, or a folder with model.safetensors"
_MOST_INDEX_BYTES = 2**26
_MOST_NAME = 1000  # characters of an array's
_SHOWN = 4  # names in a line
_CHECKED = 2**22  # numbers that are checked at a time


class Match(NamedTuple):
    """How the arrays of a file map to the model."""

    arrays: dict[str, Readable]  # by names of Learner.state()
    missing: list[str]  # names of the model's state dict that the file does not have
    left_over: list[str]  # names of the file that the model does not have
    skipped: list[str]  # skipped by model.weights_skip


class File(NamedTuple):
    """The content of a file or folder."""

    arrays: dict[str, Readable]  # by the names of a state dict
    lines: list[str]  # for the user
    scale: float | None = None  # of the adapters among them, if known
    places: Mapping[str, WeightPlace] = {}  # of arrays that every rank can read from a file


def load_pretrained(
    config: Config, communicator: Communicator, learner: Learner, go_on: Callable[[], None]
) -> Loaded:
    """Loads pretrained weights into every rank's learner. Every rank calls it. Raises UserError on
    all of them.

    Rank 0 matches the names. Then each rank reads its own elements of safetensors files that all
    ranks see. Rank 0 sends the other arrays one by one.
    """
    names = learner.state_dict_names()
    pieces = {piece.name: piece for piece in learner.pieces()}
    dtypes = {name: piece.dtype for name, piece in pieces.items()}
    shapes = {name: piece.shape for name, piece in pieces.items()}
    where = config.where("model.weights")
    arrays: dict[str, Readable] = {}

    def read() -> tuple[list[str], dict[str, WeightPlace], int]:
        nonlocal arrays
        path = Path(str(config.model.weights)).expanduser()
        file = read_weights(path, where)
        found, renamed = with_names_of_model(file.arrays, config.model, names)
        found, of_adapters = with_adapters(found, file.scale, names, shapes, config)
        if not config.model.weights_names and (
            _is_of_library(path) or not names.keys() <= found.keys()
        ):
            found = learner.own_names(found) or found
        match = matched(found, names, shapes, config)
        arrays = match.arrays
        _check_kinds(arrays, names, dtypes, config)
        said = _lines(path, match, len(set(names.values())))
        lines = [*file.lines, *renamed, *said, *of_adapters, *_other_stats(path, config)]
        places = _places(file, arrays)
        return lines, places, len(arrays) - len(places)

    def check(own: str, array: Readable) -> None:
        for numbers in pieces_of(array, _CHECKED):
            _check_numbers(numbers, own, names, dtypes[own], config)

    def check_all(moved: Callable[[], None]) -> None:
        for own, array in arrays.items():
            check(own, array)
            moved()

    lines, places, others = on_rank_0(communicator, read)
    if communicator.size > 1:
        why = why_one_rank_reads(communicator, places, where, go_on)
        if not why:
            arrays = {own: array for own, array in arrays.items() if own not in places}
            digest = load_own_elements(communicator, learner, places, where, check, go_on)
            lines = [*lines, "        each rank reads a part of them from the file"]
            if not others:
                return Loaded(digest, lines)
            what = f"        rank 0 sends {others} that the file has in another form"
            lines = [*lines, what]
        else:
            lines = [*lines, f"        rank 0 reads and sends them: {why}"]
    long_on_rank_0(communicator, check_all, go_on)
    return Loaded(
        broadcast_state(communicator, learner, arrays, only_weights=True, on_array=go_on), lines
    )


def _places(file: File, arrays: Mapping[str, Readable]) -> dict[str, WeightPlace]:
    """Where the arrays lie in files that have them as they are."""
    of_arrays = {id(array): file.places.get(name) for name, array in file.arrays.items()}
    places = {own: of_arrays.get(id(array)) for own, array in arrays.items()}
    return {own: place for own, place in places.items() if place is not None}


def _is_of_library(path: Path) -> bool:
    """Whether a folder, or a file's folder, is in Hugging Face's format."""
    return ((path if path.is_dir() else path.parent) / "config.json").is_file()


def check_exists(path: Path, where: str) -> None:
    """Raises UserError if model.weights names no file or folder."""
    if not path.exists():
        raise UserError(f"there is no {path}", where, _KNOWN)


def read_weights(path: Path, where: str) -> File:
    """Reads arrays by the names of a state dict. Raises UserError if there are none."""
    try:
        file = _of_folder(path, where) if path.is_dir() else _of_file(path, where)
    except OSError as error:
        raise UserError(
            f"cannot read {short(str(error.filename or path))}: {error.strerror or error}",
            where,
            "a file that can be read",
        ) from None
    if not file.arrays:
        raise UserError(
            f"{path} does not contain named arrays",
            where,
            "a file of torch.save(model.state_dict(), FILE), or of safetensors",
        )
    if strange := [
        name for name in file.arrays if not name.isprintable() or len(name) > _MOST_NAME
    ]:
        raise UserError(
            f"{path} contains an array named {short(strange[0])}",
            where,
            f"names of at most {_MOST_NAME} printable characters",
        )
    return file


def _of_file(path: Path, where: str) -> File:
    check_exists(path, where)
    check_regular(path)
    if path.suffix == ".safetensors":
        arrays = _of_safetensors(path, where)
        return File(arrays, [], places=_places_in(path, arrays))
    weights_file: Any = importlib.import_module("hvdtrain.extras.pretrained.torch_file")
    found = weights_file.read_state_dict(path, _INSIDE, where)
    return File(found.arrays, found.lines)


def _places_in(path: Path, names: Iterable[str]) -> dict[str, WeightPlace]:
    return {name: WeightPlace(path.absolute(), name) for name in names}


def _of_folder(folder: Path, where: str) -> File:
    if files.finished(folder):
        return _of_run(folder)
    name = next((name for name in _OF_HUGGING_FACE if (folder / name).is_file()), None)
    if name is None and (folder / "adapter_config.json").is_file():
        what = f"{folder} contains a peft adapter without the weights that it belongs to"
        raise UserError(
            what,
            where,
            "peft's model.merge_and_unload() returns a model without adapters: "
            "model.save_pretrained(FOLDER)",
        )
    if name is None:
        raise UserError(
            f"{folder} is not a run folder with a checkpoint and does not contain "
            f"{' or '.join(_OF_HUGGING_FACE)}",
            where,
            _KNOWN,
        )
    if not name.endswith(".json"):
        return _of_file(folder / name, where)
    return _of_index(folder, name, where)


def _of_index(folder: Path, name: str, where: str) -> File:
    """Reads the arrays of the files that an index names. Raises UserError if the index does not
    match the files."""
    try:
        if check_regular(folder / name).st_size > _MOST_INDEX_BYTES:
            raise ValueError(f"more than {_MOST_INDEX_BYTES} bytes")
        weights = json.loads((folder / name).read_text())["weight_map"]
        parts = sorted({str(file) for file in weights.values()})
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(
            f"{folder / name} is not an index of weights: {first_line(error)}", where, _KNOWN
        ) from None
    if strange := [file for file in parts if Path(file).name != file or not file.isprintable()]:
        raise UserError(
            f"{folder / name} names {short(strange[0])}, which is not a file in that folder",
            where,
            _KNOWN,
        )
    arrays: dict[str, Readable] = {}
    places: dict[str, WeightPlace] = {}
    for file in parts:
        more = _of_safetensors(folder / file, where)
        if twins := sorted(arrays.keys() & more.keys()):
            raise UserError(
                f"{short(twins[0])} is in {file} and in another file of {folder / name}",
                where,
                _KNOWN,
            )
        arrays |= more
        places |= _places_in(folder / file, more)
    if absent := sorted(weights.keys() - arrays.keys()):
        raise UserError(
            f"{folder / name} names {_some(absent)}, which the files do not have",
            where,
            "another copy of the folder",
        )
    return File(arrays, [], places=places)


def _of_run(run: Path) -> File:
    checkpoint, arrays, notes = newest_good(run, sys.maxsize, mapped=True)
    config = {assignment.key: assignment.value for assignment in read_run_config(run)}
    names = checkpoint.names or plain_names(arrays)
    sources = {own: own for own in arrays}  # by the names of a state
    if config.get(EMA.key) is not None:
        sources |= averages(sources)
    if absent := [own for own in names.values() if own not in arrays]:
        raise UserError(
            f"{checkpoint.folder} lacks {_some(absent)}, although its list of arrays names them",
            "model.weights",
            "another checkpoint",
        )
    lines = [*notes, f"weights of step {checkpoint.train_state.progress.step} of {run}"]
    found: dict[str, Readable] = {name: arrays[sources[own]] for name, own in names.items()}
    folder = checkpoint.folder.absolute()
    places = {
        name: WeightPlace(folder / files.file_of(sources[own]), sources[own])
        for name, own in names.items()
    }
    return File(found, lines, scale_of(config), places)


def _of_safetensors(path: Path, where: str) -> dict[str, Readable]:
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(
            path, framework="numpy"
        ):  # checks the header, and that the arrays fill the file exactly
            pass
        with path.open("rb") as file:
            return map_unconverted(file)
    except KeyError as error:
        raise UserError(
            f"{path} has numbers of type {error}, which is not read",
            where,
            "weights of F32, F16 or BF16",
        ) from None
    except (SafetensorError, ValueError, MemoryError) as error:
        raise UserError(
            f"{path} is not a readable safetensors file: {first_line(error)}", where, _KNOWN
        ) from None


def with_names_of_model(
    found: dict[str, Readable], model: ModelConfig, names: Mapping[str, str]
) -> tuple[dict[str, Readable], list[str]]:
    """Applies model.weights_names, and removes the prefixes of DDP and torch.compile. Returns the
    arrays, and lines for the user."""
    lines: list[str] = []
    for entry in model.weights_names:
        old, is_pair, new = entry.partition("=")
        if not is_pair:
            raise UserError(
                f"model.weights_names: {short(entry)} is not OLD=NEW",
                model.where("weights_names"),
                f"'{entry}=' excludes it",
            )
        renamed = {name: _renamed(name, old, new, model.where("weights_names")) for name in found}
        if not any(renamed.values()):
            what = (
                "model.weights_names: no array's name "
                f"{'matches' if '*' in old else 'begins with'} {short(old)!r}"
            )
            raise UserError(
                what,
                model.where("weights_names"),
                f"the first names are {', '.join(list(found)[:_SHOWN])}",
            )
        found = _under_new_names(found, renamed, entry, model.where("weights_names"))
    plain, left_out = without_wrappers(found, names)
    return plain, [*lines, *left_out]


def _renamed(name: str, old: str, new: str, where: str) -> str | None:
    """Renames by OLD=NEW, or returns None if OLD does not match. OLD is a prefix; with *, it
    matches the whole name, and each * in NEW is replaced by the match of the * in OLD."""
    if "*" not in old and "*" not in new:
        return new + name.removeprefix(old) if name.startswith(old) else None
    if old.count("*") != new.count("*"):
        what = (
            f"model.weights_names: {short(f'{old}={new}')} has {old.count('*')} * before the = "
            f"and {new.count('*')} after it"
        )
        raise UserError(
            what, where, "use the same number: 'encoder.layer.*.query.*=layers.*.q_proj.*'"
        )
    fitting = re.fullmatch("(.*?)".join(map(re.escape, old.split("*"))), name)
    if fitting is None:
        return None
    return "".join(
        part
        for pair in itertools.zip_longest(new.split("*"), fitting.groups(), fillvalue="")
        for part in pair
    )


def _under_new_names(
    found: Mapping[str, Readable], renamed: Mapping[str, str | None], entry: str, where: str
) -> dict[str, Readable]:
    """Renames arrays. Raises UserError if two arrays would have the same name."""
    names: dict[str, str] = {}
    for name in found:
        new = renamed[name] or name
        if new in names:
            raise UserError(
                f"model.weights_names: {short(entry)} makes {names[new]} and {name} both {new}",
                where,
                "a pattern that matches one of them",
            )
        names[new] = name
    return {new: found[name] for new, name in names.items()}


def matched(
    found: Mapping[str, Readable],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    config: Config,
) -> Match:
    """Maps the arrays to the model. Raises UserError if none matches, or if one has another
    shape."""
    patterns = config.model.weights_skip
    where = config.where("model.weights")
    ties = Ties(names)
    skipped = [
        name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            what = f"model.weights_skip: {short(pattern)} matches no weight of the model"
            raise UserError(
                what,
                config.where("model.weights_skip"),
                f"its first names are {', '.join(list(names)[:_SHOWN])}",
            )
    ties.check_whole(
        lambda name: name in skipped,
        f"model.weights_skip={list(patterns)}",
        config.where("model.weights_skip"),
    )
    taken = [name for name in names if name in found and name not in skipped]
    if not taken:
        what = (
            f"no array of {config.model.weights} has the name of a weight: the file has "
            f"{_some(list(found))}, the model {_some(list(names))}"
        )
        raise UserError(
            what,
            where,
            "model.weights_names=['OLD=NEW'] to rename prefixes, or the weights of this model",
        )
    for name in taken:
        if found[name].shape != shapes[names[name]]:
            what = (
                f"{name} is {found[name].shape} in {config.model.weights}, but "
                f"{shapes[names[name]]} in the model"
            )
            layer = name.rpartition(".")[0]
            raise UserError(
                what,
                where,
                f"model.weights_skip=['{layer}.*'] keeps the layer's initial weights; or another "
                "model",
            )
    check_equal(
        {name: found[name] for name in taken},
        ties,
        lambda a, b: np.array_equal(in_memory(found[a]), in_memory(found[b]), equal_nan=True),
        where,
    )
    arrays = {names[name]: found[name] for name in taken}
    match = Match(
        arrays=arrays,
        missing=[
            name
            for name in names
            if name not in found and name not in skipped and names[name] not in arrays
        ],  # a tied array has two
        left_over=[name for name in found if name not in names],
        skipped=skipped,
    )
    path = str(config.model.weights)
    loaded = [name for name in names if names[name] in arrays]
    check_leftovers(
        {name: found[name].dtype.name for name in match.left_over}, loaded, names, path, where
    )
    check_missing(match.missing, names, loaded, path, where)
    _check_frozen(match, names, config)
    return match


def _check_kinds(
    arrays: Mapping[str, Readable],
    names: Mapping[str, str],
    dtypes: Mapping[str, np.dtype[Any]],
    config: Config,
) -> None:
    """Raises UserError for arrays whose type of numbers the model cannot take, such as integers
    where it has floating-point numbers. arrays, dtypes: by names of Learner.state()."""
    for own, array in arrays.items():
        dtype = dtypes[own]
        if dtype.kind in "iubc" and array.dtype.kind != "c":
            continue
        if array.dtype.kind in "iubc" and dtype.kind != "c":
            raise UserError(
                f"{_shown(own, names, config)} is {array.dtype.name}, but the model has "
                f"{dtype.name}",
                config.where("model.weights"),
                "a file with floating-point weights; for a quantized model, the weights before "
                "quantization",
            )


def _check_numbers(
    numbers: np.ndarray, own: str, names: Mapping[str, str], dtype: np.dtype[Any], config: Config
) -> None:
    """Raises WrongWeights if numbers (n,) of an array cannot be converted to the model's float
    type.

    own: its name in Learner.state(). Buffers may be infinite, such as attention masks.
    """
    if dtype.kind in "iubc" and numbers.dtype.kind != "c":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        found = numbers.astype(dtype, copy=False)
    wrong = ~np.isfinite(found) if own.startswith("p.") else np.isnan(found)
    if wrong.any():
        what = (
            f"{_shown(own, names, config)} has {numbers[wrong][0]}, which is not a finite "
            f"{dtype.name} number"
        )
        raise WrongWeights(
            what,
            config.where("model.weights"),
            "weights from before the job diverged, or another file",
        )


def _shown(own: str, names: Mapping[str, str], config: Config) -> str:
    name = {of_state: name for name, of_state in names.items()}[own]
    return f"{name} of {config.model.weights}"


def _check_frozen(match: Match, names: Mapping[str, str], config: Config) -> None:
    """Raises UserError if model.lora freezes a weight that is not in the file."""
    for name in match.missing if config.model.lora else ():
        is_weight = names[name].startswith("p.") and not is_adapter(name)
        if is_weight and not any(
            fnmatch.fnmatchcase(name, pattern) for pattern in config.model.lora_train
        ):
            what = (
                f"{name} is not in {config.model.weights}, but model.lora freezes it at its "
                "random initial values"
            )
            fix = (
                f"model.weights_skip=['{name.rpartition('.')[0]}.*'] trains that layer; or a file "
                "with it"
            )
            raise UserError(what, config.where("model.weights"), fix)


def _lines(path: Path, match: Match, of: int) -> list[str]:
    lines = [f"weights {path}: {len(match.arrays)} of {of} arrays are loaded"]
    for names, what in (
        (match.skipped, "left as they begin, by model.weights_skip"),
        (match.missing, "not in the file: these are left as they begin"),
        (match.left_over, "of the file are not of the model"),
    ):
        if names:
            lines.append(f"        {len(names)} {what}: {_some(names)}")
    return lines


def _other_stats(path: Path, config: Config) -> list[str]:
    """Returns a line if a Hugging Face folder gives a mean and deviation for its weights that
    differ from the job's."""
    try:
        check_regular(path / "preprocessor_config.json")
        found = json.loads((path / "preprocessor_config.json").read_text())
        mean = found["image_mean"]
        std = found["image_std"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    if mean == config.data.mean and std == config.data.std:
        return []
    said = " ".join(
        f"data.{name}={json.dumps(of, separators=(',', ':'))}"
        for name, of in (("mean", mean), ("std", std))
    )
    return [
        f"        they were trained with {said}, as preprocessor_config.json says; this job has "
        "others"
    ]


def _some(names: list[str]) -> str:
    return short(", ".join(names[:_SHOWN]), 200) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )

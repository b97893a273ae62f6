"""model.name=transformers:FOLDER or :CLASS: creates a model from its configuration, and renames
weights like the library does when it reads them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.core.arrays import Readable, digests
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.errors import BUG, UserError, exit_code_of, first_line, nearest, short
from hvdtrain.extras.libraries.config_json import check_options, read_config
from hvdtrain.frameworks.torch.foreign.counted import TooLarge, made_within_limits
from hvdtrain.frameworks.torch.foreign.downloads import is_download

_BESIDE_CONFIGURATION = ("num_labels", "attn_implementation")  # options that to_dict() lacks


def model_of(name: str, where: str) -> Callable[..., torch.nn.Module]:
    """Returns a function that creates the model of a folder with config.json, or of a class whose
    option `config` is such a folder.

    Its other options override config.json; num_labels and num_channels default to the task's. Code
    in the folder is not run, and nothing is downloaded. Raises UserError if transformers is not
    installed or has no such class.
    """
    transformers = _load(where)
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if (
        kind is not None
        and not _is_of_models(transformers, kind)
        and not _finds_models(transformers, kind)
    ):
        raise UserError(
            f"transformers.{short(name)} is not a model class",
            where,
            "transformers:AutoModelForImageClassification, or a folder",
        )

    def make(
        config: str | None = None, outputs: int | None = None, shape: Any = (), **options: Any
    ) -> torch.nn.Module:
        folder = Path(name if kind is None and config is None else config or "").expanduser()
        if kind is None and config is not None:
            raise UserError(
                f"transformers:{short(name)} and model.config both name a folder",
                where,
                "one of them",
            )
        if kind is not None and config is None:
            raise UserError(
                f"model.name=transformers:{name} needs the folder of its configuration",
                where,
                "model.config=FOLDER",
            )
        sizes = ({"num_labels": outputs} if outputs else {}) | (
            {"num_channels": shape[-1]} if len(shape) == 3 else {}
        )
        found = _configuration(transformers, folder, sizes, options, where)
        model = _model(
            transformers, kind or _class_of(transformers, found, folder, where), found, where
        )
        _read_generation(transformers, model, folder, where)
        return model

    return make


def _load(where: str) -> Any:
    define_missing_operators()  # transformers imports torchvision for models of images
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(f"{error}", where, "pip install transformers") from None
    return transformers


def _configuration(
    transformers: Any,
    folder: Path,
    sizes: Mapping[str, int],
    options: Mapping[str, Any],
    where: str,
) -> Any:
    """Reads a folder's configuration, overridden by these options; sizes are set if it has such
    keys and the options do not set them."""
    if not os.path.lexists(folder / "config.json"):
        what = f"{folder / 'config.json'} does not exist"
        raise UserError(
            what,
            where,
            "a folder of save_pretrained(), or one that `hf download OWNER/NAME --local-dir "
            "FOLDER` wrote",
        )
    check_options(options, where)
    tree, code = read_config(folder / "config.json", where)
    with _copy_of(tree) as copy, _wrong(copy, folder, where):
        own = _read(transformers, copy, {})
        if unknown := next(
            (
                option
                for option in options
                if option not in own.to_dict() and option not in _BESIDE_CONFIGURATION
            ),
            None,
        ):
            raise UserError(
                f"{own.model_type} of transformers has no option {short(unknown)}",
                where,
                nearest(unknown, list(own.to_dict())),
            )
        wanted = {key: size for key, size in sizes.items() if hasattr(own, key)} | dict(options)
        labels = wanted.pop("num_labels", own.num_labels)
        configuration = _read(transformers, copy, wanted)
        configuration.name_or_path = str(folder)
        # converted to the job's dtype later, so that initial weights are not rounded before
        configuration.dtype = torch.get_default_dtype()
        if labels != configuration.num_labels:
            configuration.num_labels = labels  # creates names of classes, too
    if code:
        warnings.warn(
            f"{folder / 'config.json'}: {', '.join(code)} names code of the folder or of a hub, "
            "which does not run",
            stacklevel=2,
        )
    return configuration


@contextlib.contextmanager
def _copy_of(tree: Mapping[str, Any]) -> Iterator[str]:
    """Creates a folder with only this config.json, so that the library reads nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tree))
        yield folder


def _read(transformers: Any, folder: str, options: Mapping[str, Any]) -> Any:
    """Returns the library's configuration. Suppresses its warnings, which are for the authors of
    the folder."""
    return transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **options
    )


@contextlib.contextmanager
def _wrong(copy: str, folder: Path, where: str) -> Iterator[None]:
    """Converts the library's errors to a UserError with its message, except if memory is
    exhausted."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or exit_code_of(error) != BUG:
            raise
        _refuse_value(error, folder, where)
        what = (
            f"transformers does not read {folder / 'config.json'}: "
            f"{first_line(error).replace(copy, str(folder))}"
        )
        raise UserError(what, where, "a configuration of the library's own models") from error


def _refuse_value(error: Exception, folder: Path, where: str) -> None:
    """Raises UserError for an invalid value of a configuration key, which some versions of
    transformers report with an error of huggingface_hub."""
    if any(kind.__name__ == "StrictDataclassFieldValidationError" for kind in type(error).__mro__):
        what = str(error.__cause__ or error).partition(". Errors:")[0].partition("\n")[0]
        raise UserError(
            f"transformers rejects {folder / 'config.json'}: {what}", where, "a value of that type"
        ) from error


def _is_of_models(transformers: Any, kind: Any) -> bool:
    """Whether a class is one of the library's model classes."""
    return (
        isinstance(kind, type)
        and issubclass(kind, transformers.PreTrainedModel)
        and kind is not transformers.PreTrainedModel
    )


def _finds_models(transformers: Any, kind: Any) -> bool:
    """Whether it is one of the classes that find the model's: AutoModelForImageClassification."""
    return isinstance(kind, type) and issubclass(
        kind, transformers.models.auto.auto_factory._BaseAutoModelClass
    )


def _class_of(transformers: Any, config: Any, folder: Path, where: str) -> Any:
    """Returns the class that wrote the folder."""
    names = config.architectures if isinstance(config.architectures, list) else []
    named = str(names[0]) if names else "none"
    kind = getattr(transformers, named, None) if named.isidentifier() else None
    if kind is None or not _is_of_models(transformers, kind):
        lacks = "does not have" if kind is None else "does not have as a model"
        what = (
            f"{folder / 'config.json'} names the class {short(named)}, which transformers "
            f"{transformers.__version__} {lacks}"
        )
        raise UserError(
            what,
            where,
            f"model.name=transformers:CLASS model.config={folder}: "
            "AutoModelForImageClassification, ...",
        )
    return kind


def _model(transformers: Any, kind: Any, config: Any, where: str) -> torch.nn.Module:
    def make() -> torch.nn.Module:
        model: torch.nn.Module = (
            kind.from_config(config, trust_remote_code=False)
            if hasattr(kind, "from_config")
            else kind(config)
        )
        return model

    what = (
        f"transformers does not make {kind.__name__} of {config.name_or_path}/config.json, a "
        f"{type(config).__name__}"
    )
    try:
        with _never_asking():
            return made_within_limits(make)
    except TooLarge as error:
        raise UserError(
            f"{kind.__name__} of {config.name_or_path}/config.json has {error}",
            where,
            "a smaller model, or shard.stage=3",
        ) from None
    except Exception as error:
        if isinstance(error, UserError) or exit_code_of(error) != BUG or is_download(error):
            raise
        fix = "a class that matches the configuration, or other options of `model`"
        raise UserError(
            f"{what}: {type(error).__name__}: {first_line(error)}", where, fix
        ) from error


def _read_generation(transformers: Any, model: Any, folder: Path, where: str) -> None:
    """Reads generation_config.json: the tokens that end a text, and how others generate."""
    path = folder / "generation_config.json"
    if not os.path.lexists(path) or not model.can_generate():
        return
    tree, _ = read_config(path, where)
    try:
        model.generation_config = transformers.GenerationConfig.from_dict(tree)
    except Exception as error:
        if exit_code_of(error) != BUG:
            raise
        what = f"transformers does not read {path}: {type(error).__name__}: {first_line(error)}"
        raise UserError(what, where, "remove the file, or restore it from a copy") from error


@contextlib.contextmanager
def _never_asking() -> Iterator[None]:
    """Within the context, the library raises an error instead of asking on the terminal whether
    code of a folder may run."""
    code: Any = importlib.import_module("transformers.dynamic_module_utils")
    before = code.TIME_OUT_REMOTE_CODE
    code.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        code.TIME_OUT_REMOTE_CODE = before


def in_names_of(
    model: torch.nn.Module, found: Mapping[str, Readable]
) -> dict[str, Readable] | None:
    """Returns the arrays of a transformers file, by the names in `model`; None if the model is from
    another library.

    Its from_pretrained() renames and joins them. An array with the numbers of one in `found` is
    that one, so that ranks can read it from the file. An unused array keeps its name in the file;
    for an array with another shape, only the shape is right. Raises UserError if it fails.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    # FSDP2 creates a subclass
    kind: Any = next(
        kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.")
    )
    tensors = _tensors(found)
    widest = max(
        (t.dtype for t in tensors.values() if t.is_floating_point()),
        key=lambda dtype: dtype.itemsize,
        default=torch.float32,
    )
    try:
        with (
            _quiet(transformers),
            _never_asking(),
            torch.random.fork_rng(devices=[]),
        ):  # it initializes missing weights
            fresh, told = kind.from_pretrained(
                None,
                config=model.config,
                state_dict=tensors,
                dtype=widest,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        what = (
            f"{kind.__name__}.from_pretrained() of transformers fails: {type(error).__name__}: "
            f"{error}"
        ).partition("\n")[0]
        raise UserError(
            what, "model.weights", "model.weights_names=['='] leaves names as the file has them"
        ) from error
    shapes = {
        name: np.broadcast_to(np.float32(0), shape) for name, shape, _ in told["mismatched_keys"]
    }
    unknown = {name: found.get(name, np.zeros(0)) for name in sorted(told["unexpected_keys"])}
    absent = {*told["missing_keys"], *shapes}
    loaded = {
        name: _array(tensor) for name, tensor in fresh.state_dict().items() if name not in absent
    }
    return {**_as_found(loaded, found, tensors, widest), **shapes, **unknown}


def _as_found(
    loaded: Mapping[str, np.ndarray],
    found: Mapping[str, Readable],
    tensors: Mapping[str, torch.Tensor],
    widest: torch.dtype,
) -> dict[str, Readable]:
    """Replaces each loaded array by one of the file that has the same numbers, if there is one: the
    library does not tell which array it renamed to which.

    tensors: of the arrays in the file, by their names.
    """
    sources: dict[int, str] = {}
    for name, tensor in tensors.items():
        converted = tensor.to(widest) if tensor.is_floating_point() else tensor
        sources[digests([("", _array(converted))])[""]] = name
    numbers = digests(loaded.items())
    return {
        name: found[sources[numbers[name]]] if numbers[name] in sources else array
        for name, array in loaded.items()
    }


def _tensors(found: Mapping[str, Readable]) -> dict[str, torch.Tensor]:
    """Views of the arrays, as of files that are mapped: nothing writes into them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(np.asarray(array)) for name, array in found.items()}


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Within the context, the library prints no table of names and no progress bar; the caller
    reports what was loaded."""
    log = transformers.utils.logging
    before = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()

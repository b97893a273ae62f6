"""The config.json of a stranger's folder: it is within limits, and nothing in it runs code, fetches
or opens a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.core.folder import check_regular
from hvdtrain.errors import UserError, short

_MOST_BYTES = 2**24  # limit for the file: the names of 100,000 classes take 4 MB
_MOST_LEVELS = 32
# limit for counts such as labels and positions, from which libraries make lists or dicts
_MOST_COUNT = 2**22
_MOST_LAYERS = 10_000
_MOST_NUMBER = 2**53
_IS_COUNT = re.compile(r"^(num|n)_|label|expert|head|group")
_IS_LAYERS = re.compile(
    r"(^|_)(num|n)_(.*_)?(layer|block|stage)s?(_|$)|(^|_)layers$|depth|block_(sizes|repeats|number)$"
)
# a window of -1 is none
_IS_SIZE = re.compile(r"^(num|n)_|(?<!window)_size$|_layers$")
_CLASSES = ("label2id", "id2label")  # the keys in them are names and numbers of classes
_CODE = ("auto_map", "custom_pipelines")  # name code in the folder or on a hub
# only describe where the file was
_LEFT_OUT = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "configuration_files",
)
_KERNELS = re.compile(r"(attn|experts)_implementation|use_kernels|kernel_config")
_QUANTIZED = ("quantization_config", "compression_config")
_FILES = ("checkpoint_path", "cache_dir", "gguf_file", "index_path", "passages_path", "pretrained")
# names of timm's models; with a colon or a slash they name a folder or a hub
_MODELS = (
    "architecture",
    "backbone",
)
_FIX = "the folder of a model of the library, as save_pretrained() writes it"


def read_config(path: Path, where: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration without keys that name code, and these keys. Raises UserError for
    an invalid file."""
    try:
        if check_regular(path).st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        found = json.loads(path.read_bytes(), object_pairs_hook=_without_twins)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}, not an object with keys")
        left_out: list[str] = []
        return _checked("config.json", found, left_out), sorted(set(left_out))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}", where, _FIX) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not a configuration of a model: {error}".partition("\n")[0], where, _FIX
        ) from None


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raises UserError for options that a config.json may not have."""
    left_out: list[str] = []
    try:
        _checked("model", dict(options), left_out)
    except (ValueError, RecursionError) as error:
        raise UserError(f"options of the model: {error}", where, "leave it out") from None
    if left_out:
        raise UserError(
            f"model.{left_out[0]} names code, which hvdtrain does not run", where, "leave it out"
        )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"{short(next(key for key in keys if keys.count(key) > 1))} is given twice"
        )
    return values


def _checked(key: str, value: Any, left_out: list[str], level: int = 0) -> Any:
    """Returns the value of a key without keys that name code, which are added to left_out. Raises
    ValueError."""
    if level > _MOST_LEVELS:
        raise ValueError(f"{short(key)} has more than {_MOST_LEVELS} levels")
    _refuse_actions(key, value)
    if isinstance(value, dict):
        left_out += [inner for inner in _CODE if value.get(inner)]
        kept = {inner: each for inner, each in value.items() if inner not in (*_CODE, *_LEFT_OUT)}
        return {
            inner: _checked(key if key in _CLASSES else inner, each, left_out, level + 1)
            for inner, each in kept.items()
        }
    if isinstance(value, list):
        return [_checked(key, each, left_out, level + 1) for each in value]
    if isinstance(value, int):
        _refuse_number(key, value)
    return value


def _refuse_number(key: str, value: int) -> None:
    if _IS_LAYERS.search(key):
        most = _MOST_LAYERS
    elif _IS_COUNT.search(key):
        most = _MOST_COUNT
    else:
        most = _MOST_NUMBER
    if abs(value) > most:
        raise ValueError(f"{short(key)}={short(str(value))} is more than {most}")
    if value < 0 and _IS_SIZE.search(key):
        raise ValueError(f"{short(key)}={value} is negative")


def _refuse_actions(key: str, value: Any) -> None:
    """Raises ValueError for a value that makes the library open or fetch something else."""
    if key in _QUANTIZED and value is not None:
        raise ValueError(
            f"{key} belongs to quantized weights, which cannot be trained: use the folder of the "
            "unquantized model"
        )
    if key in _FILES and value not in (None, False):
        raise ValueError(
            f"{key}={short(str(value))} names a file or weights: use model.weights for them"
        )
    if key in _MODELS and isinstance(value, str) and not re.fullmatch(r"[\w.-]+", value):
        raise ValueError(f"{key}={short(value)} is not the name of a model of timm")
    if _KERNELS.search(key) and re.search("[^\\w{}' :,]", str(value)):
        raise ValueError(f"{key}={short(str(value))} would download a kernel")

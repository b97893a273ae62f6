"""Files of torch.save() from strangers: no code in them runs, and none takes more memory than its
size."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import BUG, UserError, exit_code_of, first_line, short

_FIX = "a file of torch.save(model.state_dict(), FILE), or of safetensors"
_MOST_DIMENSIONS = 64  # of an array of numpy


def read_state_dict(path: Path, inside: Sequence[str], where: str) -> Arrays:
    """The tensors by name of a file, or of the first of `inside` that it has them under: on the
    host, bfloat16 as float32.

    Raises UserError for a file of anything else, and for a tensor that is no array.
    """
    tree = _load(path, where)
    if isinstance(tree, Mapping):
        name = next((name for name in inside if isinstance(tree.get(name), Mapping)), None)
        if name is not None:
            _check_one_set(tree, name, path, where)
            tree = tree[name]
    if not isinstance(tree, Mapping):
        raise UserError(
            f"{path} has a {type(tree).__name__}",
            where,
            "a file of torch.save(model.state_dict(), FILE)",
        )
    tensors = [
        (str(name), value) for name, value in tree.items() if isinstance(value, torch.Tensor)
    ]
    if len(dict(tensors)) < len(tensors):
        raise UserError(f"{path} has two arrays of one name", where, _FIX)
    return {name: _as_array(name, tensor, path, where) for name, tensor in tensors}


def _check_one_set(tree: Mapping[Any, Any], name: str, path: Path, where: str) -> None:
    """Raises UserError where a file has averages of weights beside the weights."""
    ends = _ends(tree[name])
    for other, value in tree.items():
        if other == name or "ema" not in str(other).lower() or not isinstance(value, Mapping):
            continue
        if ends & _ends(value):
            what = f"{path} has weights as {short(name)!r} and averages of them as {short(other)!r}"
            raise UserError(
                what,
                where,
                f"torch.save(torch.load(FILE)['{short(other)}'], 'averages.pt') has one of them "
                "alone",
            )


def _ends(tree: Mapping[Any, Any]) -> set[str]:
    """The last two parts of the names of tensors in it, and in mappings in it: an average may have
    a prefix before them."""
    inside = [value for value in tree.values() if isinstance(value, Mapping)]
    return {
        ".".join(str(name).split(".")[-2:])
        for each in [tree, *inside]
        for name, value in each.items()
        if isinstance(value, torch.Tensor)
    }


def _load(path: Path, where: str) -> Any:
    try:
        _refuse_compressed(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except torch.serialization.pickle.UnpicklingError:
        raise UserError(
            f"{path} has more than tensors, numbers and texts, or is damaged: only its own code "
            "could read it",
            where,
            _FIX,
        ) from None
    except Exception as error:
        wrong = UserError(
            f"{path} has no weights alone: {type(error).__name__}: {first_line(error)}", where, _FIX
        )
        if exit_code_of(error) != BUG:  # the memory is full
            wrong.code = exit_code_of(error)
        raise wrong from None


def _refuse_compressed(path: Path) -> None:
    """Raises ValueError for a zip file whose parts are larger than the file; torch.save()
    compresses none."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > path.stat().st_size:
        raise ValueError(
            f"its parts have {size} bytes, the file {path.stat().st_size}: torch.save() does not "
            "compress"
        )


def _as_array(name: str, tensor: torch.Tensor, path: Path, where: str) -> np.ndarray:
    """Raises UserError for numbers or an arrangement of them that numpy does not have."""
    kinds = {
        "has no numbers, as on the device meta": tensor.is_meta,
        "is a nested tensor": tensor.is_nested,
        "is sparse": tensor.layout != torch.strided,
        "is quantized": tensor.is_quantized,
        f"has more than {_MOST_DIMENSIONS} dimensions": not tensor.is_nested
        and tensor.dim() > _MOST_DIMENSIONS,
    }
    try:
        if wrong := next((kind for kind, is_so in kinds.items() if is_so), None):
            raise ValueError(wrong)
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        array: np.ndarray = tensor.detach().resolve_conj().resolve_neg().numpy()
        return array
    except (ValueError, TypeError, RuntimeError) as error:
        wrong = (
            first_line(error)
            if isinstance(error, ValueError)
            else f"is of {tensor.dtype}, which is not read"
        )
        raise UserError(
            f"{path}: {name} {wrong}", where, "dense tensors of float32, float16 or bfloat16"
        ) from None

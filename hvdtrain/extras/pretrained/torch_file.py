"""Files of torch.save() from strangers: no code in them runs, and none takes more memory than its
size."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import BUG, UserError, exit_code_of, first_line, short

_FIX = "a file of torch.save(model.state_dict(), FILE), or of safetensors"
_MOST_DIMENSIONS = 64  # limit of a NumPy array


class StateDict(NamedTuple):
    """The tensors by name of a file."""

    arrays: Arrays
    lines: list[str]  # lines for the user


def read_state_dict(path: Path, inside: Sequence[str], where: str) -> StateDict:
    """Reads the tensors of a file by name, or the tensors under the first name of `inside` that has
    weights. They are on the host, bfloat16 as float32.

    Raises UserError for a file with anything else or with several sets of weights, and for a tensor
    that cannot be converted to an array.
    """
    tree = _load(path, where)
    lines: list[str] = []
    if isinstance(tree, Mapping):
        sets = [name for name in inside if isinstance(tree.get(name), Mapping)]
        # settings of the model may have such a name, too
        name = next((name for name in sets if _tensors(tree[name])), next(iter(sets), None))
        if name is not None:
            _check_one_set(tree, name, inside, path, where)
            if others := _others(tree, name):
                lines = [f"weights {path}: taken is {short(name)!r}, beside {', '.join(others)}"]
            tree = tree[name]
    if not isinstance(tree, Mapping):
        raise UserError(
            f"{path} contains a {type(tree).__name__}, not a state_dict",
            where,
            "a file of torch.save(model.state_dict(), FILE)",
        )
    tensors = [
        (str(name), value) for name, value in tree.items() if isinstance(value, torch.Tensor)
    ]
    if len(dict(tensors)) < len(tensors):
        raise UserError(f"{path} has two arrays of one name", where, _FIX)
    arrays = {name: _as_array(name, tensor, path, where) for name, tensor in tensors}
    return StateDict(arrays, lines)


def _check_one_set(
    tree: Mapping[Any, Any], name: str, inside: Sequence[str], path: Path, where: str
) -> None:
    """Raises UserError if a file also has averages of the weights, or other weights with the same
    names."""
    weights = tree[name]
    for other, value in tree.items():
        if other == name or not isinstance(value, Mapping) or "optim" in str(other).lower():
            continue
        if not _is_alike(weights, value):
            continue
        is_average = "ema" in str(other).lower()
        is_set = other in inside or _ends(weights).keys() <= _ends(value).keys()
        if is_average or (is_set and not _are_equal(weights, value)):
            kind = "averages of them" if is_average else "other weights"
            what = (
                f"{path} contains weights under {short(name)!r} and {kind} under "
                f"{short(str(other))!r}"
            )
            ours = f"torch.load(FILE)[{short(name)!r}]"
            theirs = f"torch.load(FILE)[{short(str(other))!r}]{_inner(weights, value)}"
            fix = f"torch.save({ours}, 'weights.pt') keeps one of them; the other is {theirs}"
            raise UserError(what, where, fix)
    beside = {key: one for key, one in tree.items() if not _is_tree(one)}
    if _is_alike(weights, beside) and _ends(weights).keys() <= _ends(beside).keys():
        what = (
            f"{path} contains weights under {short(name)!r} and others with the same names "
            "next to it"
        )
        raise UserError(what, where, f"torch.save(torch.load(FILE)[{short(name)!r}], 'weights.pt')")


def _is_alike(weights: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether a mapping may contain other values of these weights: at least half of the common
    names have tensors of equal shapes."""
    ours = _ends(weights)
    theirs = _ends(other)
    shared = ours.keys() & theirs.keys()
    same = sum(not ours[end].isdisjoint(theirs[end]) for end in shared)
    return bool(shared) and 2 * same >= len(shared)


def _inner(weights: Mapping[Any, Any], other: Mapping[Any, Any]) -> str:
    """Returns the inner mapping with the weights, such as "['shadow']"; empty if they are in the
    outer one."""
    if _is_alike(weights, _tensors(other)):
        return ""
    found = (key for key, value in other.items() if _is_tree(value) and _is_alike(weights, value))
    return "".join(f"[{short(str(key))!r}]" for key in list(found)[:1])


def _is_tree(value: Any) -> bool:
    return isinstance(value, Mapping)


def _tensors(tree: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors directly in a mapping, by name."""
    return {
        name: value
        for name, value in tree.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


def _are_equal(tree: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two mappings have the same tensors."""
    ours = _tensors(tree)
    theirs = _tensors(other)
    return ours.keys() == theirs.keys() and all(
        _is_equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors have the same bytes, so that NaN equals NaN; False if they cannot
    be compared."""
    try:
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            return False
        return torch.equal(_bytes_of(tensor), _bytes_of(other))
    except (RuntimeError, TypeError, ValueError):  # NotImplementedError is a RuntimeError
        return False


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes. Raises ValueError if it is not dense, or if it would take more
    memory than it has."""
    is_dense = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)
    if not is_dense or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(tensor.layout)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _others(tree: Mapping[Any, Any], name: str) -> list[str]:
    """Returns the other mappings of named tensors in a file."""
    return [
        f"{short(str(other))!r}{', which is the same' * _are_equal(tree[name], value)}"
        for other, value in tree.items()
        if other != name
        and isinstance(value, Mapping)
        and "optim" not in str(other).lower()
        and _tensors(value)
    ]


def _ends(tree: Mapping[Any, Any]) -> dict[str, set[tuple[int, ...]]]:
    """Returns the last two parts of the names of all tensors, also in inner mappings, with their
    shapes; an average may have a prefix before them."""
    ends: dict[str, set[tuple[int, ...]]] = {}
    inside = [value for value in tree.values() if isinstance(value, Mapping)]
    for each in [tree, *inside]:
        for name, value in each.items():
            if isinstance(value, torch.Tensor) and not value.is_nested:
                shapes = ends.setdefault(".".join(str(name).split(".")[-2:]), set())
                shapes.add(tuple(value.shape))
    return ends


def _load(path: Path, where: str) -> Any:
    try:
        _refuse_compressed(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except torch.serialization.pickle.UnpicklingError:
        raise UserError(
            f"{path} contains more than tensors, numbers and strings, or is damaged: only its own "
            "code could read it",
            where,
            _FIX,
        ) from None
    except Exception as error:
        wrong = UserError(
            f"{path} cannot be read as plain weights: {type(error).__name__}: {first_line(error)}",
            where,
            _FIX,
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
            f"its parts have {size} bytes, but the file has {path.stat().st_size}: torch.save() "
            "does not compress"
        )


def _as_array(name: str, tensor: torch.Tensor, path: Path, where: str) -> np.ndarray:
    """Returns a tensor as an array. Raises UserError for a dtype or layout that NumPy does not
    have."""
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
            else f"has type {tensor.dtype}, which is not supported"
        )
        raise UserError(
            f"{path}: {name} {wrong}", where, "dense tensors of float32, float16 or bfloat16"
        ) from None

"""Extra values of a script in a checkpoint: plain values as JSON, tensors as arrays by name; never
pickle."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError

PREFIX = "e."  # prefix of their names in a checkpoint
MOST_BYTES = 2**28
_TREE = f"{PREFIX}json"
_MOST_DEPTH = 32
# no other mappings, because a defaultdict has code
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "map": dict,
    "ordered": OrderedDict,
    "counter": Counter,
}
_WHERE = "ctx.checkpoint()"
_FIX = (
    "numbers, texts, None, lists, tuples, dicts, arrays, tensors, or an object whose "
    "state_dict() contains these, such as a scheduler"
)


class Numbers(NamedTuple):
    """A framework's tensor on the host."""

    data: np.ndarray  # uint8 (bytes,), a copy
    dtype: str
    shape: tuple[int, ...]


class Tensors(NamedTuple):
    """Converts a framework's tensors for a checkpoint and back."""

    numbers: Callable[[Any], Numbers | None]  # None of anything else
    made: Callable[[Numbers], Any]  # raises ValueError


def to_arrays(extra: Mapping[str, Any], tensors: Tensors) -> Arrays:
    """Copies each value. Raises UserError for unsupported values, and if all take more than
    MOST_BYTES."""
    arrays: Arrays = {}
    tree = _Encoder(arrays, tensors).encoded(extra, "", 0)
    arrays[_TREE] = np.frombuffer(json.dumps(tree).encode(), np.uint8).copy()
    taken = sum(array.nbytes for array in arrays.values())
    if taken > MOST_BYTES:
        what = (
            f"the extra values take {taken / 2**20:.0f} MiB, but at most {MOST_BYTES / 2**20:.0f} "
            "are allowed"
        )
        raise UserError(what, _WHERE, "store large tensors as buffers of the model")
    return arrays


def from_arrays(arrays: Arrays, tensors: Tensors) -> dict[str, Any]:
    """Restores the values of to_arrays(). Raises ValueError if they are invalid."""
    try:
        values = _decoded(json.loads(arrays[_TREE].tobytes()), arrays, tensors)
    except (LookupError, TypeError, RecursionError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("no mapping")
    return values


class _Encoder(NamedTuple):
    arrays: Arrays  # the collected arrays, by name
    tensors: Tensors

    def encoded(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise UserError(f"{path[:80]} is nested more than {_MOST_DEPTH} deep", _WHERE, _FIX)
        if hasattr(value, "state_dict") and callable(value.state_dict):
            value = value.state_dict()
        if value is None or type(value) in (
            bool,
            int,
            float,
            str,
            np.str_,
        ):  # not IntEnum, which would be restored as an int
            return value
        if isinstance(value, np.generic) and value.dtype.kind in "iufb":
            return {"scalar": self._put(np.array([value]))}
        if (
            type(value) in (np.ndarray, np.memmap) and value.dtype.kind in "iufb"
        ):  # not a masked array, whose mask would be dropped
            return {"array": self._put(np.array(value))}
        if (numbers := self.tensors.numbers(value)) is not None:
            return {"tensor": [self._put(numbers.data), numbers.dtype, list(numbers.shape)]}
        if isinstance(value, Mapping):
            pairs = [
                [key, self.encoded(inner, f"{path}.{key}".removeprefix("."), depth + 1)]
                for key, inner in value.items()
            ]
            kind = next((kind for kind, of in _MAPPINGS.items() if type(value) is of), "")
            if kind and all(
                key is None or isinstance(key, (bool, int, float, str)) for key in value
            ):
                return {kind: pairs}
        if type(value) in (list, tuple):
            items = [
                self.encoded(inner, f"{path}[{index}]", depth + 1)
                for index, inner in enumerate(value)
            ]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise UserError(
            f"{path or 'a value'} is a {type(value).__name__}, which a checkpoint cannot store",
            _WHERE,
            _FIX,
        )

    def _put(self, array: np.ndarray) -> str:
        name = f"{PREFIX}{len(self.arrays)}"
        self.arrays[name] = array
        return name


def _decoded(tree: Any, arrays: Arrays, tensors: Tensors) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({key: _decoded(inner, arrays, tensors) for key, inner in content})
    if kind in ("list", "tuple"):
        items = [_decoded(inner, arrays, tensors) for inner in content]
        return items if kind == "list" else tuple(items)
    if kind in ("array", "scalar"):
        return arrays[content] if kind == "array" else arrays[content][0]
    name, dtype, shape = content
    if kind != "tensor":
        raise ValueError(f"a value of kind {kind!r:.40}")
    return tensors.made(Numbers(arrays[name], dtype, shape))

"""Digests of the objects that a script gives, to compare ranks: the values of a model's settings, the code of a function."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.tasks.functions.sample_loss import is_torch_module

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which differs from process to process
_MOST_DEPTH = 4  # of functions in functions, and of lists in lists


def given_objects(config: Config) -> dict[str, Any]:
    """By what a message calls them; data have digests of their own."""
    given = [section.given for section in (config.data, config.task, config.model) if section.given is not None]
    return {name: thing for one in given for name, thing in one.objects.items() if thing is not None}


def object_digests(config: Config) -> dict[str, str]:
    """Short digests; what cannot be seen, as the state of an object that is no number, is left out."""
    return {f"the {name} of the script": _digest(thing) for name, thing in given_objects(config).items()}


def paths_of(thing: Any) -> set[str]:
    """package.module:Class of an object's class, of all modules of a torch module, and of functions."""
    things: Iterable[Any] = thing.modules() if is_torch_module(thing) else [thing]
    return {f"{kind.__module__}:{kind.__qualname__}" for kind in map(_named, things) if getattr(kind, "__module__", None)}


def _named(thing: Any) -> Any:
    """Itself where it is a function or a class, else its class."""
    if isinstance(thing, functools.partial):
        return _named(thing.func)
    return thing if hasattr(thing, "__qualname__") else type(thing)


def _digest(thing: Any) -> str:
    return hashlib.sha256(repr(list(_parts(thing, _MOST_DEPTH))).encode()).hexdigest()[:12]


def _parts(thing: Any, depth: int) -> Iterator[Any]:
    """Plain values that tell a thing from another one, the same in every process."""
    if thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
        yield repr(thing)
    elif depth and isinstance(thing, (list, tuple)):
        for inner in thing:
            yield list(_parts(inner, depth - 1))
    elif depth and isinstance(thing, dict):
        for key, inner in thing.items():
            yield key if isinstance(key, str) else type(key).__name__, list(_parts(inner, depth - 1))
    elif isinstance(thing, functools.partial):
        yield [list(_parts(inner, depth)) for inner in (thing.func, thing.args, thing.keywords)]
    elif is_torch_module(thing):
        yield _ADDRESS.sub("", repr(thing))
        yield [(name, _shape(array), str(array.dtype)) for name, array in thing.state_dict().items()]
        yield [sorted(_plain(module).items()) for module in thing.modules()]
    elif isinstance(thing, type):
        yield thing.__module__, thing.__qualname__
    elif isinstance(getattr(thing, "__code__", None), CodeType):
        yield thing.__qualname__, list(_code(thing.__code__))
        if depth:
            cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != type(cell)()]
            cells = [inner for inner in cells if not isinstance(inner, str)]
            yield [list(_parts(inner, depth - 1)) for inner in (thing.__defaults__, thing.__kwdefaults__, cells)]
    elif hasattr(thing, "shape") and hasattr(thing, "dtype"):
        yield _array(thing)
    else:
        yield _named(thing).__module__, _named(thing).__qualname__, sorted(_plain(thing).items())


def _plain(thing: Any) -> dict[str, str]:
    """The settings of an object that are numbers; texts, as "cuda:1", may rightly differ."""
    found = getattr(thing, "__dict__", {})
    return {str(name): repr(value) for name, value in found.items() if isinstance(value, (bool, int, float)) and name != "training"}


def _code(code: CodeType) -> Iterator[Any]:
    """Without line numbers: those are compared with the file."""
    yield code.co_code, code.co_names
    for constant in code.co_consts:
        yield list(_code(constant)) if isinstance(constant, CodeType) else _ADDRESS.sub("", repr(constant))


def _shape(array: Any) -> tuple[int, ...]:
    """Empty for a parameter of a lazy layer, which has none yet."""
    try:
        return tuple(array.shape)
    except RuntimeError:
        return ()


def _array(thing: Any) -> Any:
    """What identifies a NumPy array, or a tensor in host memory."""
    try:
        array = np.ascontiguousarray(thing)
        return array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()[:12]
    except (TypeError, ValueError, RuntimeError):
        return str(thing.dtype), tuple(thing.shape)

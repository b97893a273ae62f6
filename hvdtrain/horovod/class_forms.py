"""Objects of classes that every rank has loaded: dataclasses, dicts, named tuples, members of an Enum. None of their code runs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

from hvdtrain.horovod.engine.errors import BadCall

FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, Counter, OrderedDict)}  # of a defaultdict
_DICTS: tuple[type[dict[Any, Any]], ...] = (defaultdict, Counter, OrderedDict, dict)  # a class before those it is made from
_WHERE = "an object of another rank"
_FIX = "the same class on every rank"


class Path(NamedTuple):
    """By which every rank finds a class."""

    module: str
    name: str


class Refused(Exception):
    """What of an object would be lost, in words that go behind its class."""


def path_of(kind: type) -> Path:
    return Path(kind.__module__, kind.__qualname__)


def loaded(path: Path, base: type) -> Any:
    """A class that this process has loaded; nothing is imported for it, which would run code."""
    found: Any = sys.modules.get(path.module)
    for part in path.name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise BadCall(f"this rank has not loaded the class {path.module}.{path.name}", _WHERE, "import it on every rank")
    return found


def is_named_tuple(thing: Any) -> bool:
    return isinstance(thing, tuple) and hasattr(type(thing), "_fields")


def named_tuple(path: Path, fields: tuple[str, ...], values: list[Any]) -> Any:
    kind = loaded(path, tuple)
    _check_fields(path, tuple(getattr(kind, "_fields", ())), fields)
    return tuple.__new__(kind, values)


def member(path: Path, name: str) -> Any:
    return loaded(path, enum.Enum).__members__[name]


def is_dataclass(thing: Any) -> bool:
    """An object of one that object() alone makes, and no built-in class that has a state of its own."""
    kind = type(thing)
    return dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__


def fields_of(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass. Raises Refused where it has attributes beside them; cached properties are found again."""
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    kept = set(_slots(type(thing))) | {name for name in getattr(thing, "__dict__", {}) if not _is_cached(type(thing), name)}
    if more := sorted(name for name in kept - set(fields) if hasattr(thing, name)):
        raise Refused(f"has attributes that are no fields: {', '.join(more[:8])}")
    return fields


def dataclass(path: Path, values: dict[str, Any]) -> Any:
    kind = loaded(path, object)
    if not (dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__):
        raise BadCall(f"{path.module}.{path.name} is no dataclass on this rank", _WHERE, _FIX)
    _check_fields(path, tuple(field.name for field in dataclasses.fields(kind)), tuple(values))
    found: Any = object.__new__(loaded(path, object))
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


class Dict(NamedTuple):
    """What a dict of a class beside dict has, its items apart."""

    base: str  # of Python's own, from which the class is made
    path: Path | None  # of a class that is none of Python's
    factory: str | None  # of a defaultdict
    is_its_attributes: bool  # self.__dict__ = self
    mirrored: list[str]  # attributes that are the items of the same name
    attributes: dict[str, Any]  # the others


def dict_of(thing: dict[Any, Any]) -> Dict:
    """Raises Refused where something of it would be lost."""
    kind = type(thing)
    base = next(each for each in _DICTS if isinstance(thing, each))
    if kind.__new__ is not base.__new__ or any(_slots(kind)):
        raise Refused("has more in it than items and attributes")
    factory = thing.default_factory if isinstance(thing, defaultdict) else None
    if factory is not None and factory not in FACTORIES.values():
        raise Refused(f"has the default factory {factory!r:.80}")
    factory_name = None if factory is None else factory.__name__
    path = None if kind is base else path_of(kind)
    attributes = getattr(thing, "__dict__", {})
    if attributes is thing:
        return Dict(base.__name__, path, factory_name, True, [], {})
    mirrored = [name for name, value in attributes.items() if name in thing and dict.__getitem__(thing, name) is value]
    return Dict(base.__name__, path, factory_name, False, mirrored, {k: v for k, v in attributes.items() if k not in mirrored})


def restored_dict(form: Dict, items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    base: Any = next(kind for kind in _DICTS if kind.__name__ == form.base)
    kind = base if form.path is None else loaded(form.path, base)
    if kind.__new__ is not base.__new__:
        raise BadCall(f"{kind.__qualname__} is made in another way on this rank", _WHERE, _FIX)
    found: Any = base.__new__(kind)
    if isinstance(found, defaultdict) and form.factory is not None:
        found.default_factory = FACTORIES[form.factory]
    put = OrderedDict.__setitem__ if isinstance(found, OrderedDict) else dict.__setitem__
    for key, value in items:
        put(found, key, value)
    if form.is_its_attributes:
        object.__setattr__(found, "__dict__", found)
    elif form.mirrored or form.attributes:
        found.__dict__.update({name: dict.__getitem__(found, name) for name in form.mirrored}, **form.attributes)
    return found


def _check_fields(path: Path, own: tuple[str, ...], sent: tuple[str, ...]) -> None:
    if own != sent:
        raise BadCall(f"{path.module}.{path.name} has other fields than {sent}", _WHERE, _FIX)


def _slots(kind: type) -> list[str]:
    """Names of attributes that are not in __dict__, of classes written in Python."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)

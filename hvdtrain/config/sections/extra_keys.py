"""Configuration keys of extras: complete sections, and keys in existing sections."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model

from hvdtrain.config.sections.section import Section
from hvdtrain.core.extras import modules

S = TypeVar("S", bound=Section)


@functools.cache
def key_classes() -> list[type[Section]]:
    """Returns the classes in KEYS of every extras/NAME/keys.py.

    If hvdtrain does not have a section of that name, the class becomes one. Otherwise its keys,
    properties and methods are added to that section, where super() is the class in
    config/sections/.
    """
    return [kind for module in modules("keys").values() for kind in module.KEYS]


def dividing_keys() -> list[str]:
    """Returns keys of extras that divide a model among ranks."""
    return [key for kind in key_classes() for key in kind.dividing]


def defaults() -> dict[str, Any]:
    """Returns every key of an extra -> its default."""
    return {
        kind.full_key(name): value
        for kind in key_classes()
        for name, value in kind().model_dump().items()
    }


def unused_keys(config: BaseModel) -> list[tuple[str, str]]:
    """Returns section and name of the keys of extras that a job does not use, because all keys of a
    class have their defaults."""
    return [
        (kind.section, name)
        for kind in key_classes()
        for name in kind.model_fields
        if kind.of(config).model_dump(include=set(kind.model_fields)) == kind().model_dump()
    ]


def with_keys_of_extras(kind: type[S]) -> type[S]:
    """A decorator that adds the keys of extras to a section."""
    added = [each for each in key_classes() if each.section == kind.section]
    if not added:
        return kind
    return _in_order(_subclass(kind, (*added, kind)), added)


def with_sections_of_extras(kind: type[S]) -> type[S]:
    """A decorator that adds the sections of extras to the class of the configuration."""
    added = [each for each in key_classes() if each.section not in kind.model_fields]
    if not added:
        return kind
    fields = {each.section: (each, Field(default_factory=each)) for each in added}
    section = _subclass(kind, (kind,), **fields)
    for each in added:
        _move(section, [each.section], each.behind)
    return section


def _subclass(kind: type[S], bases: tuple[Any, ...], **fields: Any) -> type[S]:
    made: type[S] = create_model(
        kind.__name__, __base__=bases, __module__=kind.__module__, __doc__=kind.__doc__, **fields
    )
    return made


def _in_order(kind: type[S], added: Iterable[type[Section]]) -> type[S]:
    left = list(added)
    while left:  # keys that others follow come first
        behind = {name for each in left for name in each.model_fields}
        each = next((each for each in left if each.behind not in behind), left[0])
        left.remove(each)
        _move(kind, list(each.model_fields), each.behind)
    return kind


def _move(kind: type[Section], names: list[str], behind: str) -> None:
    """Moves these fields behind another one, or to the end if there is no field of that name.

    Nothing has been validated yet (defer_build), so validators and the JSON Schema use this order.
    """
    fields = kind.model_fields
    others = {name: info for name, info in fields.items() if name not in names}
    moved = {name: fields[name] for name in names}
    fields.clear()
    for name, info in others.items():
        fields[name] = info
        if name == behind:
            fields.update(moved)
    fields.update(moved)

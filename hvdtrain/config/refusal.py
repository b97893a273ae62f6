"""A value that the schema refuses, as a message: its key, where it was set, and what the key takes."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hvdtrain.config.schema import SECTIONS, Config, PieceConfig
from hvdtrain.config.section import Provenance, Section
from hvdtrain.errors import UserError, nearest, short

OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
SANITY_BOUND = 1e6  # a highest value from here on only keeps numbers sane: a message names it where it is exceeded
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path", NoneType: "null"}
PIECES = "a list of pieces, as in [{kind: constant, epochs: 5}, {kind: cosine}]"


def refusal(error: ErrorDetails, provenance: Provenance) -> UserError:
    """One of the errors that pydantic found in a configuration."""
    location, value = error["loc"], error["input"]
    key = ".".join(str(part) for part in location[: 2 if location[0] in SECTIONS else 1])
    name, info = _find(location)
    if info is None:
        return UserError(f"no such key: {name}", provenance.where(key), nearest(str(location[-1]), list(PieceConfig.model_fields)))
    if error["type"] in OUT_OF_BOUNDS:
        return UserError(f"{name} is {short(repr(value))}", provenance.where(key), f"give {_bounds(info, value)}")
    list_name = name.rpartition("[")[0] if isinstance(location[-1], int) else name
    fix = f"{list_name} takes {type_name(info.annotation)}"
    return UserError(f"wrong value for {name}: {short(repr(value))}", provenance.where(key), fix)


def _find(location: Sequence[str | int]) -> tuple[str, FieldInfo | None]:
    """The name of a place in the configuration, `recipe.chain[0].kind`, and its field; None for an unknown key."""
    section: type[Section] = Config
    name, info = "", None
    for part in location:
        if isinstance(part, int):
            name, section = f"{name}[{part}]", PieceConfig
        else:
            name, info = f"{name}.{part}".lstrip("."), section.model_fields.get(part)
            section = SECTIONS.get(part, section)
    return name, info


def _bounds(info: FieldInfo, value: float) -> str:
    """The numbers that a field takes: `0 to 1`, `1 or more`, `more than 0, or null`."""
    bound = {name: getattr(limit, name) for limit in info.metadata for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)}
    highest = bound.get("le", math.inf)
    if "lt" in bound:
        numbers = f"{bound['ge']:g} or more and less than {bound['lt']:g}"
    elif highest < SANITY_BOUND or highest < value < math.inf:
        numbers = f"{bound['ge']:g} to {highest:g}" if "ge" in bound else f"more than {bound['gt']:g}, up to {highest:g}"
    else:
        numbers = f"more than {bound['gt']:g}" if "gt" in bound else f"{bound['ge']:g} or more" if bound else "a finite number"
    return f"{numbers}, or null" if NoneType in typing.get_args(info.annotation) else numbers


def type_name(kind: Any) -> str:
    """A type in words: `a whole number, or null`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(repr(choice) for choice in inner)}"
    if origin in (typing.Union, UnionType):
        return ", or ".join(type_name(part) for part in inner)
    if kind == list[PieceConfig]:
        return PIECES
    if origin in (list, tuple):
        length = "" if origin is list or ... in inner else f" of {len(inner)}"
        return f"a list{length}, each {type_name(inner[0])}"
    return TYPE_NAMES[kind] if kind in TYPE_NAMES else getattr(kind, "__name__", str(kind))

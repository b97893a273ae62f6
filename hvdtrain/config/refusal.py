"""Converts a wrong key, value or argument to a message: where it was set, what the key accepts, and
what was probably meant."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hvdtrain.config.schema import SECTIONS, Config, known_keys
from hvdtrain.config.sections.model import ThawConfig
from hvdtrain.config.sections.optim import GroupConfig
from hvdtrain.config.sections.recipe import PieceConfig
from hvdtrain.config.sections.section import Provenance, Section
from hvdtrain.config.words_of_other_tools import (
    assignment_of,
    data_of_path,
    right_key,
    right_value,
    without_a_key,
    without_a_value,
)
from hvdtrain.core.lengths import LengthValue
from hvdtrain.errors import UserError, closest, nearest, short

OUT_OF_BOUNDS = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "finite_number",
)
# an upper bound from here on is only a sanity check: a message names it only if a value exceeds it
SANITY_BOUND = 1e6
TYPE_NAMES = {
    float | str: "a length",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    NoneType: "null",
}
LISTS = {  # lists whose entries have keys
    PieceConfig: "a list of pieces, as in [{kind: constant, length: 5}, {kind: cosine}]",
    GroupConfig: "a list of groups, as in [{names: '*.bias', rate: 64}]",
    ThawConfig: "a list, as in [{at: 2, names: ['backbone.*']}]",
}
# command line options, besides key=value
_OPTIONS = (
    "--config",
    "--help",
    "--max-time",
    "--print-config",
    "--version",
)
_HELP = "hvdtrain --help; --help KEY shows one key, COMMAND --help a command"


def refusal(error: ErrorDetails, provenance: Provenance) -> UserError:
    """Converts one error of pydantic."""
    location = error["loc"]
    value = error["input"]
    key = ".".join(str(part) for part in location[: 2 if location[0] in SECTIONS else 1])
    name, info, section = _find(location)
    if info is None:
        is_length = section is PieceConfig and location[-1] == "epochs"
        fix = (
            "did you mean length?"
            if is_length
            else nearest(str(location[-1]), list(section.model_fields))
        )
        return UserError(f"no such key: {name}", provenance.where(key), fix)
    if error["type"] == "missing":
        return UserError(
            f"{name.rpartition('.')[0]} has no {location[-1]}",
            provenance.where(key),
            expected(name, info, value),
        )
    if error["type"] in OUT_OF_BOUNDS:
        return UserError(
            f"{name} is {short(repr(value))}", provenance.where(key), f"give {_bounds(info, value)}"
        )
    if error["type"] == "value_error":  # the error of a length
        is_kind = name == "recipe.warmup" and value in ("gradual", "constant")
        fix = (
            f"recipe.warmup_kind={value}, and recipe.warmup is its length"
            if is_kind
            else f"{error['ctx']['error']}"
        )
        return UserError(
            f"wrong value for {name}: {short(repr(value))}", provenance.where(key), fix
        )
    entry, colon, number = str(location[-1]).partition(":")
    if (
        value is None and colon and typing.get_origin(info.annotation) is dict
    ):  # YAML reads {tokens:0} as a single name
        what = f"{name} has the name {short(entry + colon + number)} without a value"
        return UserError(
            what,
            provenance.where(key),
            f"a blank after the colon: '{name}={{{entry}: {number or 0}}}'",
        )
    list_name = name.rpartition("[")[0]
    is_entry = isinstance(location[-1], int)
    fix = (
        f"{list_name} takes {type_name(info.annotation)}"
        if is_entry
        else expected(name, info, value)
    )
    return UserError(f"wrong value for {name}: {short(repr(value))}", provenance.where(key), fix)


def expected(key: str, info: FieldInfo, value: Any) -> str:
    """Returns the fix for a value of the wrong type: the type that the key takes, with the likely
    choice or an example.

    `epochs takes a whole number: epochs=10`, `log.trackers takes a list, each a text:
    'log.trackers=[wandb]'`.
    """
    kind = info.annotation
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if instead := without_a_value(key, value):
            return f"{key} takes {type_name(kind)}; {instead}"
        meant = right_value(key, value) or closest(f"{value}", [*map(str, choices)])
        return f"{key} takes {type_name(kind)}" + (f"; did you mean {meant}?" if meant else "")
    most = next((limit.max_length for limit in info.metadata if hasattr(limit, "max_length")), None)
    example = _example(kind, default, value[:most] if isinstance(value, list) and most else value)
    shown = f'"{key}={example}"' if "'" in example else shlex.quote(f"{key}={example}")
    words = (
        type_name(kind).replace("a list", f"a list of at most {most}", 1)
        if most
        else type_name(kind)
    )
    return f"{key} takes {words}" + (f": {shown}" if example else "")


def _example(kind: Any, default: Any, value: Any) -> str:
    """Returns a valid value of a type, near the wrong value; empty if there is none."""
    if typing.get_origin(kind) in (list, tuple):
        inner = typing.get_args(kind)[0]
        inner = (
            typing.get_args(inner)[0]
            if typing.get_origin(inner) is typing.Annotated and inner != LengthValue
            else inner
        )
        types = (int, float) if inner in (float, LengthValue) else (inner,)
        entries = value if isinstance(value, list) else [value]
        if inner is str:
            entries = [f"{entry}" if type(entry) in (int, float) else entry for entry in entries]
        example = default or (entries if all(type(entry) in types for entry in entries) else None)
        return f"[{','.join(map(_as_yaml, example))}]" if example else ""
    if type(default) not in (int, float):
        return ""
    return f"{int(value) if isinstance(value, float) and value.is_integer() else default}"


def _as_yaml(entry: Any) -> str:
    """Formats an entry of a list: a string is quoted if YAML would read something else."""
    import yaml  # --help does not need it

    if not isinstance(entry, str):
        return json.dumps(entry, separators=(",", ":"))
    return (
        entry
        if re.fullmatch(r"[\w./*:-]+", entry)
        and entry[0].isalpha()
        and yaml.safe_load(entry) == entry
        else f"'{entry}'"
    )


def _find(location: Sequence[str | int]) -> tuple[str, FieldInfo | None, type[Section]]:
    """Returns the name of a place in the configuration, such as `recipe.chain[0].kind`, its field
    (None for an unknown key), and its section."""
    section: type[Section] = Config
    name = ""
    info = None
    for part in location:
        if info is not None and typing.get_origin(info.annotation) in (typing.Union, dict):
            break  # the rest is a part of the union, or a user's name
        if isinstance(part, int):
            name = f"{name}[{part}]"
            section = _of_entries(info, section)
        else:
            section = SECTIONS.get(name, section)
            name = f"{name}.{part}".lstrip(".")
            info = section.model_fields.get(part)
    return name, info, section


def _of_entries(info: FieldInfo | None, section: type[Section]) -> type[Section]:
    """Returns the section of a list's entries; the section of the list itself if they are numbers
    or strings."""
    kinds = typing.get_args(info.annotation) if info is not None else ()
    return kinds[0] if kinds and kinds[0] in LISTS else section


def takes(info: FieldInfo) -> str:
    """Describes the values that a field takes: `a whole number: 1 or more`, `one of 'mean',
    'adasum'`."""
    is_bounded = any(
        hasattr(limit, bound) for limit in info.metadata for bound in ("ge", "gt", "le", "lt")
    )
    return (
        f"{type_name(info.annotation).removesuffix(', or null')}: {_bounds(info, 0)}"
        if is_bounded
        else type_name(info.annotation)
    )


def _bounds(info: FieldInfo, value: float) -> str:
    """Describes the numbers that a field takes: `0 to 1`, `1 or more`, `more than 0, or null`."""
    # the bounds of int in int | Literal
    parts = [
        part
        for kind in typing.get_args(info.annotation)
        for part in getattr(kind, "__metadata__", ())
    ]
    limits = [*info.metadata, *(limit for part in parts for limit in getattr(part, "metadata", ()))]
    bound = {
        name: getattr(limit, name)
        for limit in limits
        for name in ("ge", "gt", "le", "lt")
        if hasattr(limit, name)
    }
    highest = bound.get("le", math.inf)
    if "lt" in bound:
        lowest = f"{bound['ge']:g} or more" if "ge" in bound else f"more than {bound['gt']:g}"
        numbers = f"{lowest} and less than {bound['lt']:g}"
    elif highest < SANITY_BOUND or highest < value < math.inf:
        numbers = (
            f"{bound['ge']:g} to {highest:g}"
            if "ge" in bound
            else f"more than {bound['gt']:g}, up to {highest:g}"
        )
    elif "gt" in bound:
        numbers = f"more than {bound['gt']:g}"
    elif bound:
        numbers = f"{bound['ge']:g} or more"
    else:
        numbers = "a finite number"
    return f"{numbers}, or null" if NoneType in typing.get_args(info.annotation) else numbers


def type_name(kind: Any) -> str:
    """Describes a type: `a whole number, or null`."""
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(repr(choice) for choice in inner)}"
    if origin in (typing.Union, UnionType) and kind not in TYPE_NAMES:
        return ", or ".join(type_name(part) for part in inner)
    if origin is typing.Annotated:
        return type_name(inner[0])
    if origin is list and inner[0] in LISTS:
        return LISTS[inner[0]]
    if origin in (list, tuple):
        length = "" if origin is list or ... in inner else f" of {len(inner)}"
        return f"a list{length}, each {type_name(inner[0])}"
    other = (
        f"names, each with {type_name(inner[1])}"
        if origin is dict
        else getattr(kind, "__name__", str(kind))
    )
    return TYPE_NAMES.get(kind, other)


def fix_of_key(key: str, value: Any = None) -> str:
    """Returns the fix for an unknown key, or for a section with a value."""
    if key in SECTIONS:
        return _fix_of_section(key, value)
    if no_key := without_a_key(key):
        return no_key
    if right := right_key(key, value):
        return f"did you mean {right}?"
    section, _, option = key.partition(".")
    beside = [name.partition(".")[2] for name in known_keys() if name.startswith(f"{section}.")]
    if not beside:
        return nearest(
            key,
            list(known_keys()),
            [name for name in known_keys() if "." not in name]
            + [f"{name}.<key>" for name in SECTIONS],
        )
    if close := closest(option, beside):
        return f"did you mean {section}.{close}?"
    return nearest(option, list(known_keys()), [f"{section}.{name}" for name in beside])


def _fix_of_section(section: str, value: Any) -> str:
    """Returns the fix for a section with a value: model.name=mlp for model=mlp."""
    data = data_of_path(value) if section == "data" else None
    if data is not None:
        return f"data is a section: write {data}; --help data lists its keys"
    right = right_key(section, value) or f"{section}.<key>"
    shown = "value" if isinstance(value, (dict, list)) or right.endswith("<key>") else short(value)
    return (
        f"{section} is a section: write {right if '=' in right else f'{right}={shown}'}; --help "
        f"{section} lists its keys"
    )


def fix_of_argument(argument: str, following: str) -> str:
    """Returns the fix for an argument that is not key=value."""
    word = argument.lstrip("-").replace("-", "_")
    if fix := without_a_key(word) or (_HELP if word == "help" else None):
        return fix
    key = word if word in known_keys() else right_key(word, following) or _ends_with(word)
    if key is not None and following.startswith("="):
        return f"write {key}{'=VALUE' if following == '=' else following}, without spaces"
    if key is None and (path := _assignment_of_path(argument)):
        return f"write {path}"
    option = closest(argument, _OPTIONS) if argument.startswith("--") else None
    if key is None and option is not None:
        return f"did you mean {option}?"
    key = key or assignment_of(word) or closest(word, list(known_keys()))
    if key is None:
        return "write key=value, as in batch.size=128; --help all-keys lists them"
    is_value = following and "=" not in following and not following.startswith("-")
    return (
        f"write {key}" if "=" in key else f"write {key}={short(following) if is_value else 'VALUE'}"
    )


def _ends_with(word: str) -> str | None:
    """Returns the key of a section with this name: optim.momentum."""
    return next((key for key in known_keys() if key.rpartition(".")[2] == word), None)


def _assignment_of_path(argument: str) -> str | None:
    """Returns the key that sets a configuration, a run folder or data by path; None if it is not a
    path."""
    if argument.endswith((".yaml", ".yml")):
        return f"--config {short(argument)}"
    if os.path.isfile(os.path.join(argument, "config.yaml")):
        return f"resume={short(argument)}"
    return data_of_path(argument)

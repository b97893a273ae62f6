"""Reads YAML as plain values with their lines, and resolves `${batch.size}` in them. Never reads
code, environment or files; size and depth are bounded."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import yaml

from hvdtrain.errors import short

MOST_BYTES = 2**16  # size of a file
MOST_KEYS = 500  # in a file: far more than the schema has
MOST_DEPTH = 32
MOST_TEXT = 4096  # characters of one value: the longest path
MOST_KEY = 200  # characters
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}", re.ASCII)  # ${batch.size}
NULL, INT, FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "int", "float"))
# without YAML 1.1's 1:30, which is 90, and 010, which is 8
_INTS = re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$")
_FLOATS = re.compile(
    r"""[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?$  # 1.  1.5  1.5e-3
      | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$               # 1e-3
      | [-+]?\.[0-9][0-9_]*([eE][-+]?[0-9]+)?$          # .5
      | [-+]?\.(inf|Inf|INF)$ | \.(nan|NaN|NAN)$""",
    re.VERBOSE,
)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader restricted to JSON values: 1e-3 is a number, 2001-01-01 a string; no
    sets, bytes or aliases, and a limited depth.

    Aliases could make a small file endless; `${key}` replaces them.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # first character of a text -> (tag, pattern) of what it may be
        first: [
            (tag, pattern)
            for tag, pattern in rules
            if not tag.endswith((":timestamp", ":float", ":int"))
        ]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (
            NULL,
            FLOAT,
            *(f"tag:yaml.org,2002:{name}" for name in ("bool", "str", "seq", "map")),
        )
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Returns the next node. Raises ValueError if it is too deep, yaml.MarkedYAMLError if it is
        an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="an alias is not read: write the value again, or ${key}",
                problem_mark=self.peek_event().start_mark,
            )
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def whole_number(self, node: yaml.Node) -> int:
        """Returns the integer of a tagged node. Raises ValueError if its text does not match the
        tag."""
        if not isinstance(node, yaml.ScalarNode) or not _INTS.match(node.value):  # `!!int [1]`
            raise ValueError(f"{short(node.value)} is not a whole number")
        return int(self.construct_yaml_int(node))

    def refuse(self, node: yaml.Node) -> None:
        """Rejects a type without a constructor: raises yaml.MarkedYAMLError."""
        tag = short(node.tag.replace("tag:yaml.org,2002:", "!!"))
        raise yaml.MarkedYAMLError(
            problem=f"{tag} is not a text, number, truth value, list or mapping",
            problem_mark=node.start_mark,
        )


Loader.add_implicit_resolver(FLOAT, _FLOATS, list("-+0123456789."))
Loader.add_implicit_resolver(INT, _INTS, list("-+0123456789"))
Loader.add_constructor(INT, Loader.whole_number)
Loader.add_constructor(None, Loader.refuse)


class Dumper(yaml.SafeDumper):
    """Writes YAML that Loader reads back unchanged: a string that looks like a number is quoted."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True, so that repeated lists are written in full."""
        return True


class Leaf(NamedTuple):
    """One value of a configuration file."""

    key: str  # "batch.size"
    node: yaml.Node
    line: int  # counted from 1


def read_text(path: str) -> str:
    """Reads a regular file of at most 64 KiB. Raises OSError for any other file: a pipe or a device
    may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"not a regular file: '{path}'")
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(f"more than {MOST_BYTES} bytes: '{path}'")
    return data.decode("utf-8")


def compose(text: str) -> yaml.Node | None:
    """Returns the tree of YAML nodes of a text. Raises yaml.YAMLError if it is not YAML, and
    ValueError if it is too deep."""
    return yaml.compose(text, Loader=Loader)


def leaves(node: yaml.Node | None, sections: Collection[str], prefix: str = "") -> Iterator[Leaf]:
    """Yields every value of a file that is not a mapping; an empty section has none.

    Raises yaml.MarkedYAMLError if the file is not a mapping, or if a key cannot be shown in a
    message.
    """
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise yaml.MarkedYAMLError(
            problem="a configuration is lines of `key: value`", problem_mark=node.start_mark
        )
    for key, value in node.value:
        try:
            name = f"{prefix}{check_key(key.value)}"
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=key.start_mark) from None
        if isinstance(value, yaml.MappingNode) and (value.value or name in sections):
            yield from leaves(value, sections, f"{name}.")
        elif not (name in sections and value.value == ""):
            yield Leaf(name, value, key.start_mark.line + 1)


def value_of(node: yaml.Node | None, as_text: bool) -> Any:
    """Returns the value of a node: None, a text, a number, a boolean, a list or a dict; for a key
    that takes a string, the text as written.

    Raises yaml.YAMLError for another type, and ValueError for a value that does not match its type
    (`!!int x`) or is out of bounds.
    """
    if node is None or node.tag == NULL:
        return None
    if as_text and isinstance(node, yaml.ScalarNode):
        return check_text(node.value)
    try:
        value = Loader("").construct_document(node)
    except (LookupError, ValueError):  # PyYAML raises this for `!!int x`
        raise ValueError(
            f"{short(node.value)} is not of its type {node.tag.replace('tag:yaml.org,2002:', '!!')}"
        ) from None
    _check_value(value)
    return value


def _check_value(value: Any, in_list: bool = False) -> None:
    """Raises ValueError for a text, number or key in a value that could do harm, or would not be
    read back unchanged."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not in_list and (
                "." in check_key(key) or not key
            ):  # to_yaml() would write it as two nested keys
                raise ValueError(
                    f"the key '{key}' within a value: write it in full, as in model.a.b=1"
                )
            check_key(key)
            _check_value(inner, in_list)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, in_list=True)
    elif isinstance(value, str):
        check_text(value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")


def check_key(key: Any) -> str:
    """Returns the key. Raises ValueError if it is not a text that a message can show."""
    if not isinstance(key, str) or len(key) > MOST_KEY or not key.isprintable():
        raise ValueError(f"a key is a text of at most {MOST_KEY} characters, not {short(key)}")
    return key


def check_text(text: str) -> str:
    """Returns the text. Raises ValueError if it is too long, would harm a path or a screen, or
    contains a `${` that is not a reference."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"a text of {len(text)} characters, at most {MOST_TEXT}")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError(f"control characters, or bytes that are not UTF-8, in {short(text)}")
    if "${" in REFERENCE.sub("", text):
        allowed = (
            "only the value of another key is looked up, as in ${batch.size}, never the "
            "environment or a file"
        )
        raise ValueError(f"{short(text)}: {allowed}")
    return text


class References:
    """Replaces references in values; `look_up` returns the value of a key, or raises ValueError."""

    def __init__(self, look_up: Callable[[str], Any]) -> None:
        self._look_up = look_up
        self._replaced: dict[
            str, Any
        ] = {}  # caches the value of each key: chains of double references would take 2^n steps
        self._open: list[str] = []  # the keys whose references are being replaced, outermost first

    def replace(self, value: Any) -> Any:
        """Returns the value without references. Raises ValueError if one cannot be replaced, or the
        text grows too long."""
        if isinstance(value, dict):
            return {key: self.replace(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.replace(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if reference := REFERENCE.fullmatch(value):
            return self._value(reference[1])
        text = check_text(REFERENCE.sub(lambda found: str(self._value(found[1])), value))
        if "${" in text:
            raise ValueError(
                f"{short(text)} is itself built from references, which is not supported"
            )
        return text

    def _value(self, key: str) -> Any:
        if key not in self._replaced:
            if key in self._open:
                raise ValueError(f"${{{key}}} refers to itself")
            if len(self._open) == MOST_DEPTH:
                raise ValueError(f"more than {MOST_DEPTH} references in a chain")
            self._open.append(key)
            self._replaced[key] = self.replace(self._look_up(key))
            self._open.pop()
        if isinstance(self._replaced[key], (dict, list)):
            raise ValueError(f"${{{key}}} is a list or a section: a reference takes a single value")
        return self._replaced[key]

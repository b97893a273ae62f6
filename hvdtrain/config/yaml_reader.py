"""YAML -> plain values with their lines: never code, and bounded in size, depth and growth."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import yaml

from hvdtrain.errors import short

MOST_BYTES = 2**16  # of a file
MOST_KEYS = 500  # in a file: the schema has 90
MOST_VALUES = 4096  # in a file, every alias written out
MOST_DEPTH = 32
MOST_TEXT = 4096  # characters of one value: the longest path
MOST_KEY = 200  # characters
NULL, FLOAT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:float"
TAGS = {NULL, FLOAT, *(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "str", "seq", "map", "merge"))}  # `<<: *x` is a merge


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but 1e-3 is a number and 2001-01-01 is a text, as in YAML 1.2 and JSON."""

    yaml_implicit_resolvers = {  # first character of a text -> (tag, pattern) of what it may be  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":timestamp", ":float"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_FLOATS = re.compile(
    r"""[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?$  # 1.  1.5  1.5e-3
      | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$               # 1e-3
      | [-+]?\.[0-9][0-9_]*([eE][-+]?[0-9]+)?$          # .5
      | [-+]?\.(inf|Inf|INF)$ | \.(nan|NaN|NAN)$""",
    re.VERBOSE,
)
Loader.add_implicit_resolver(FLOAT, _FLOATS, list("-+0123456789."))


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads back equal: a text that looks like one of its numbers is quoted."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        """Lists that are the same object are written out, without anchors."""
        return True


class Leaf(NamedTuple):
    """One value of a configuration file."""

    key: str  # "batch.size"
    node: yaml.Node
    line: int  # from 1


def read_text(path: str) -> str:
    """A regular file of at most 64 KiB. Raises OSError for all others: a pipe or a device may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"not a regular file: '{path}'")
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(f"more than {MOST_BYTES} bytes: '{path}'")
    return data.decode("utf-8")


def compose(text: str) -> yaml.Node | None:
    """The tree of YAML nodes of a text. Raises ValueError where its values or levels are too many, yaml.YAMLError where it is not YAML."""
    try:
        root = yaml.compose(text, Loader=Loader)
    except RecursionError:
        raise ValueError(f"more than {MOST_DEPTH} levels deep") from None
    values, levels = _measure(root, {})
    if values > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values, every alias written out")
    if levels > MOST_DEPTH:
        raise ValueError(f"more than {MOST_DEPTH} levels deep")
    return root


def _measure(node: yaml.Node | None, measured: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels) of a node with every alias written out, without writing them out: a node of several aliases is measured once."""
    if not isinstance(node, yaml.CollectionNode):
        return 1, 1
    if id(node) not in measured:
        measured[id(node)] = 1, 1  # for a node that contains itself, which values() and leaves() refuse
        sizes = [_measure(child, measured) for child in _children(node)]
        measured[id(node)] = 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
    return measured[id(node)]


def _children(node: yaml.CollectionNode) -> list[yaml.Node]:
    return [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value


def leaves(node: yaml.Node | None, sections: Collection[str], prefix: str = "", parents: tuple[yaml.Node, ...] = ()) -> Iterator[Leaf]:
    """Every value of a file that is not a mapping itself; a section with nothing under it has none.

    Raises yaml.MarkedYAMLError where the file is not a mapping, or a mapping contains itself.
    """
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem="a configuration is lines of `key: value`", problem_mark=node.start_mark)
    for key, value in node.value:
        try:
            name = f"{prefix}{check_key(key.value)}"
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=key.start_mark) from None
        if value in parents:
            raise yaml.MarkedYAMLError(problem=f"{name} contains itself", problem_mark=key.start_mark)
        if isinstance(value, yaml.MappingNode) and (value.value or name in sections):
            yield from leaves(value, sections, f"{name}.", (*parents, node, value))
        elif not (name in sections and value.value == ""):
            yield Leaf(name, value, key.start_mark.line + 1)


def check_key(key: Any) -> str:
    """The key. Raises ValueError where it is not a text that a message can show."""
    if not isinstance(key, str) or len(key) > MOST_KEY or not key.isprintable():
        raise ValueError(f"a key is a text of at most {MOST_KEY} characters, not {short(key)}")
    return key


def check_text(text: str) -> str:
    """The text. Raises ValueError where it is too long or would harm a path or a screen."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"a text of {len(text)} characters, at most {MOST_TEXT}")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError(f"control characters, or bytes that are not UTF-8, in {short(text)}")
    return text


def value_of(node: yaml.Node | None, as_text: bool) -> Any:
    """The value of a node: None, a text, a number, a truth value, a list or a dict; for a key that takes a text, the text as written.

    Raises ValueError where it is of another type, does not fit its type (`!!int x`), or is out of bounds; yaml.YAMLError for a wrong merge.
    """
    if node is None or node.tag == NULL:
        return None
    if as_text and isinstance(node, yaml.ScalarNode):
        return check_text(node.value)
    _check_nodes(node, ())
    try:
        value = Loader("").construct_document(node)
    except (LookupError, ValueError):  # what PyYAML raises for `!!int x`
        raise ValueError(f"{short(node.value)} is not of its type {_tag_name(node)}") from None
    _check_numbers_and_keys(value)
    return value


def _check_nodes(node: yaml.Node, parents: tuple[yaml.Node, ...]) -> None:
    """Raises ValueError for a type that JSON has not, for text too long to convert to a number, and for a node that contains itself."""
    if node.tag not in TAGS:
        raise ValueError(f"{_tag_name(node)} is not a text, number, truth value, list or mapping")
    if isinstance(node, yaml.ScalarNode):
        check_text(node.value)
    elif node in parents:
        raise ValueError("a value that contains itself")
    else:
        for child in _children(node):
            _check_nodes(child, (*parents, node))


def _tag_name(node: yaml.Node) -> str:
    return short(node.tag.replace("tag:yaml.org,2002:", "!!"))


def _check_numbers_and_keys(value: Any, in_list: bool = False) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not in_list and ("." in check_key(key) or not key):  # to_yaml() would write it as two keys, one within the other
                raise ValueError(f"the key '{key}' within a value: write it in full, as in model.a.b=1")
            check_key(key)
            _check_numbers_and_keys(inner, in_list)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers_and_keys(inner, in_list=True)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")

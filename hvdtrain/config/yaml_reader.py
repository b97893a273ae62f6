"""Text from outside -> values, never code: YAML bounded in size, depth and growth, with ${key} as its one reference."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Callable, Collection, Iterator
from typing import Any

MOST_BYTES = 2**16  # of a file
MOST_KEYS = 500  # in a file: known are 80
MOST_VALUES = 4096  # in a file, every alias written out
MOST_DEPTH = 32
MOST_TEXT = 4096  # characters of one value, before and after its references are followed: the longest path
MOST_KEY = 200  # characters
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}", re.ASCII)


def read_text(path: str) -> str:
    """A regular file of at most 64 KiB. Raises OSError for all others: a pipe or a device may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"not a regular file: '{path}'")
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(f"more than {MOST_BYTES} bytes: '{path}'")
    return data.decode("utf-8")


def compose(text: str) -> Any:
    """The YAML nodes of a text. Raises ValueError for what would grow without end, yaml.YAMLError for what is no YAML."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ValueError(f"more than {MOST_DEPTH} levels deep") from None
    values, levels = _weigh(root, {})
    if values > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values, every alias written out")
    if levels > MOST_DEPTH:
        raise ValueError(f"more than {MOST_DEPTH} levels deep")
    return root


def _weigh(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many values a node stands for, and how many levels. In the order of the text: an alias is always known when it is met."""
    import yaml

    if not isinstance(node, yaml.CollectionNode):
        return 1, 1
    if id(node) not in known:
        known[id(node)] = 1, 1  # of a node that holds itself: it is refused where it stands
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        weights = [_weigh(part, known) for part in parts]
        known[id(node)] = 1 + sum(values for values, _ in weights), 1 + max((levels for _, levels in weights), default=0)
    return known[id(node)]


def leaves(node: Any, sections: Collection[str], prefix: str = "", inside: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any, int]]:
    """(dotted key, node, line) of every value that is not a mapping itself; a section with nothing under it gives none."""
    import yaml

    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem="a configuration is lines of `key: value`", problem_mark=node.start_mark)
    for key, value in node.value:
        try:
            name = f"{prefix}{check_key(key.value)}"
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=key.start_mark) from None
        if value in inside:
            raise yaml.MarkedYAMLError(problem=f"{name} holds itself", problem_mark=key.start_mark)
        if isinstance(value, yaml.MappingNode) and (value.value or name in sections):
            yield from leaves(value, sections, f"{name}.", (*inside, node, value))
        elif not (name in sections and value.value == ""):
            yield name, value, key.start_mark.line + 1


def check_key(key: Any) -> str:
    """The key, or ValueError where it is none that a message could show."""
    if not isinstance(key, str) or len(key) > MOST_KEY or not key.isprintable():
        raise ValueError(f"a key is a text of at most {MOST_KEY} characters, not {short(key)}")
    return key


def check_text(text: str) -> str:
    """The text, or ValueError where it could do harm: in a path, on a screen, or as more than a reference to a key."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"a text of {len(text)} characters, at most {MOST_TEXT}")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError(f"control characters, or bytes that are not UTF-8, in {short(text)}")
    if text == "???":
        raise ValueError("??? stands for a value that is missing")
    if "${" in _REFERENCE.sub("", text):
        raise ValueError(
            f"{short(text)}: only the value of another key is looked up, as in ${{batch.size}}, never the environment or a file"
        )
    return text


def value_of(node: Any, as_text: bool) -> Any:
    """What a YAML node means: the text itself where a text is wanted, else what OmegaConf reads (1e-3 is a number).

    Raises ValueError and yaml.YAMLError.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
        return None
    if as_text and isinstance(node, yaml.ScalarNode):
        return check_text(node.value)
    _check_scalars(node, ())
    pair = (yaml.ScalarNode("tag:yaml.org,2002:str", "value"), node)
    text = yaml.serialize(yaml.MappingNode("tag:yaml.org,2002:map", [pair]))
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.YAMLError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(first_line(error)) from None
    except Exception as error:  # YAML's constructors raise KeyError, IndexError, AttributeError, OmegaConf's own NotImplementedError
        raise ValueError(f"{short(node.value)} is not what its tag {node.tag} says ({type(error).__name__})") from None
    _check_plain(tree["value"])
    return tree["value"]


def _check_scalars(node: Any, inside: tuple[Any, ...]) -> None:
    if isinstance(node.value, str):
        check_text(node.value)
    elif node in inside:
        raise ValueError("YAML recursive aliases")
    else:
        for part in node.value:
            for one in part if isinstance(part, tuple) else (part,):
                _check_scalars(one, (*inside, node))


def _check_plain(value: Any, listed: bool = False) -> None:
    """Raises ValueError for a number that no message could show, and for what is no text, number, truth value, list or mapping."""
    if isinstance(value, dict):
        for key, one in value.items():
            if not listed and ("." in check_key(key) or not key):  # a file would read it as two keys, one within the other
                raise ValueError(f"the key '{key}' within a value: write it whole, as in model.a.b=1")
            check_key(key)
            _check_plain(one, listed)
    elif isinstance(value, list):
        for one in value:
            _check_plain(one, True)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(f"{short(value)} is no text, number, truth value, list or mapping")


def follow(value: Any, look_up: Callable[[str], Any], known: dict[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """The value with what `look_up` gives for each ${key} in place of it; ValueError where that is not one value, or grows too long.

    Keys once followed are kept in `known`: two references in each of many values would double the work with each of them.
    """
    if isinstance(value, dict):
        return {key: follow(one, look_up, known, inside) for key, one in value.items()}
    if isinstance(value, list):
        return [follow(one, look_up, known, inside) for one in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        return _one(whole[1], look_up, known, inside)
    text = check_text(_REFERENCE.sub(lambda found: f"{_one(found[1], look_up, known, inside)}", value))
    if "${" in text:  # OmegaConf would follow it, without limits
        raise ValueError(f"{short(text)} is put together of references")
    return text


def _one(key: str, look_up: Callable[[str], Any], known: dict[str, Any], inside: tuple[str, ...]) -> Any:
    if key not in known:
        if key in inside or len(inside) == MOST_DEPTH:
            raise ValueError(f"${{{key}}} refers to itself" if key in inside else f"more than {MOST_DEPTH} references one after the other")
        known[key] = follow(look_up(key), look_up, known, (*inside, key))
    if isinstance(known[key], (dict, list)):
        raise ValueError(f"${{{key}}} is a list or a section: only one value can be taken over")
    return known[key]


def short(value: Any, most: int = 200) -> str:
    """A value as a message shows it: not endless, and nothing that a screen would take for a command."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def first_line(error: Exception) -> str:
    return short((str(error).splitlines() or [type(error).__name__])[0], 400)

"""A YAML file and key=value words -> Config; every mistake names its key, its file:line, and the nearest right word."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config import LIMITS, OPEN_SECTIONS, SECTIONS, Config
from hvdtrain.errors import UserError


class Assignment(NamedTuple):
    key: str  # "batch.size"
    value: Any
    origin: str  # "configs/x.yaml:14" or "command line"


class Origins(dict[str, str]):
    """key -> where it was set; says the key as well, ready for UserError.where."""

    def where(self, key: str) -> str:
        return f"{key}, {self.get(key, 'default')}"


def configure(path: str | None, words: Sequence[str]) -> tuple[Config, Origins]:
    """Defaults, then the file, then the words `key=value` or `--key=value`; the last one wins."""
    from omegaconf import OmegaConf  # 0.2 s, which --help does without

    node: Any = OmegaConf.structured(Config)
    origins = Origins()
    for assignment in [*(read_file(path) if path else ()), *map(read_word, words)]:
        node = _assign(node, assignment)
        origins[assignment.key] = assignment.origin
    config = _to_config(node)
    _check_limits(config, origins)
    return config, origins


def read_word(word: str) -> Assignment:
    """One word of the command line."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    key, equals, _ = word.removeprefix("--").partition("=")
    if not equals or not key:
        raise UserError(f"cannot read the word '{word}'", "command line", "write key=value, as in batch.size=128; --help lists the keys")
    try:
        node = OmegaConf.from_dotlist([word.removeprefix("--")])
        return Assignment(key, OmegaConf.select(node, key), "command line")
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"cannot read the value of '{word}': {_first_line(error)}", "command line", "quote it for the shell") from None


def read_file(path: str) -> Iterator[Assignment]:
    """Every leaf of a YAML file, with its line."""
    import yaml
    from omegaconf import OmegaConf

    try:
        text = Path(path).read_text()
        lines = dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader), ""))
        values = OmegaConf.create(text) if lines else OmegaConf.create()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration: {error}", path, "give --config an existing text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"not YAML: {getattr(error, 'problem', None) or _first_line(error)}", place, "mend that line") from None
    for key, line in lines.items():
        yield Assignment(key, OmegaConf.select(values, key), f"{path}:{line}")


def _lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """(dotted key, line) of every value that is not a mapping itself."""
    import yaml

    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise yaml.composer.ComposerError(None, None, "a configuration is lines of `key: value`", node.start_mark)
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _lines(value, f"{name}.")
        else:
            yield name, key.start_mark.line + 1


def _assign(node: Any, assignment: Assignment) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, value, origin = assignment
    known = known_keys()
    section, _, option = key.partition(".")
    if section in OPEN_SECTIONS and option and option != "options" and key not in known:
        path = [section, "options", *option.split(".")]
    elif key in known:
        path = key.split(".")
    else:
        section_fix = f"{key} is a section: write {key}.<key>=value; --help {key} lists its keys" if key in SECTIONS else ""
        raise UserError(f"no such key: {key}", origin, section_fix or nearest(key, list(known)))
    for name in reversed(path):
        value = {name: value}
    try:
        return OmegaConf.merge(node, OmegaConf.create(value))
    except OmegaConfBaseException as error:
        raise UserError(f"wrong value for {key}: {_explain(error, assignment.value)}", f"{key}, {origin}", _expected(key)) from None


def known_keys() -> dict[str, dataclasses.Field[Any]]:
    """Every key of the schema: {"epochs": ..., "batch.size": ...}."""
    keys = {top.name: top for top in dataclasses.fields(Config) if top.name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{inner.name}": inner for inner in dataclasses.fields(kind) if inner.name != "options"}
    return keys


def nearest(word: str, known: Sequence[str]) -> str:
    """The fix for a misspelt word: the nearest known one, or all of them."""
    last = word.rsplit(".", maxsplit=1)[-1]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6) or [name for name in known if name.split(".")[-1] == last]
    return f"did you mean {close[0]}? --help lists all" if close else f"known: {', '.join(known)}"


def _expected(key: str) -> str:
    if key not in known_keys():
        return "see --help"
    kind = str(known_keys()[key].type).replace(" | None", ", or null")
    if kind.startswith("Literal["):
        kind = f"one of {kind[len('Literal[') : -1]}"
    return f"{key} takes {kind}"


def _explain(error: Exception, value: Any) -> str:
    line = _first_line(error)
    return f"{value!r} ({line})" if "VALUE" not in line else repr(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _to_config(node: Any) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        raise UserError(f"cannot resolve {key}: {_first_line(error)}", key, "mend the ${...} in it") from None
    assert isinstance(config, Config), type(config)
    return config


def _check_limits(config: Config, origins: Origins) -> None:
    for key, (low, high, words) in LIMITS.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key} is {value}", origins.where(key), f"give {words}")


def to_yaml(config: Config) -> str:
    """The resolved configuration, in the form that --config reads."""
    from omegaconf import OmegaConf

    tree = dataclasses.asdict(config)
    for section in OPEN_SECTIONS:
        tree[section] |= tree[section].pop("options")
    return OmegaConf.to_yaml(OmegaConf.create(tree))

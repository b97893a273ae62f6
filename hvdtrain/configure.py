"""A YAML file and key=value words -> Config; every mistake names its key, its file:line, and the nearest right word."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config import OPEN_SECTIONS, SECTIONS, Config
from hvdtrain.errors import UserError
from hvdtrain.limits import LIMITS

COMMAND_LINE = "command line"  # the origin of a key=value word


class Assignment(NamedTuple):
    key: str  # "batch.size"
    value: Any
    origin: str  # "configs/x.yaml:14" or "command line"


class Origins(dict[str, str]):
    """key -> where it was set; says the key as well, ready for UserError.where."""

    def where(self, key: str) -> str:
        return f"{key}, {self.get(key, 'default')}"


def configure(path: str | None, words: Sequence[str]) -> tuple[Config, Origins]:
    """Defaults, then the file, then the words `key=value` or `--key=value`; the last one wins.

    With resume=RUN the resolved configuration of that run comes before all these: the same job goes on, but for what is said anew.
    """
    given = [*(read_file(path) if path is not None else ()), *map(read_word, words)]
    resume = next((a.value for a in reversed(given) if a.key == "resume"), "no")
    if resume not in (None, "no"):
        former = read_file(str(Path(resume).expanduser() / "config.yaml"))
        given = [*(a for a in former if a.key not in ("run", "resume")), *given]
    return _resolve(given)


def _resolve(given: Sequence[Assignment]) -> tuple[Config, Origins]:
    from omegaconf import OmegaConf  # 0.2 s, which --help does without

    node: Any = OmegaConf.structured(Config)
    origins = Origins()
    for assignment in given:
        node = _assign(node, assignment)
        origins[assignment.key] = assignment.origin
    config = _to_config(node, origins)
    _check_limits(config, origins)
    return config, origins


def read_word(word: str) -> Assignment:
    """One word of the command line."""
    import yaml

    key, equals, text = word.removeprefix("--").partition("=")
    if not equals or not key:
        raise UserError(f"cannot read the word '{word}'", "command line", "write key=value, as in batch.size=128; --help lists the keys")
    try:
        value = text if takes_text(key) and text != "null" else _value(key, yaml.compose(text, Loader=yaml.SafeLoader))
        return Assignment(key, None if value == "" else value, COMMAND_LINE)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"cannot read the value of '{word}': {_first_line(error)}", "command line", "quote it for the shell") from None


def read_file(path: str) -> Iterator[Assignment]:
    """Every value of a YAML file, with its line. Keys may be nested or dotted."""
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(), Loader=yaml.SafeLoader)
        lines: dict[str, int] = {}
        for key, node, line in _leaves(root, "", ()):
            if key in lines:
                raise UserError(f"{key} is given twice, in lines {lines[key]} and {line}", f"{path}:{line}", "keep one of them")
            lines[key] = line
            try:
                value = _value(key, node)
            except (yaml.YAMLError, ValueError) as error:
                what = f"cannot read the value of {key}: {getattr(error, 'problem', None) or _first_line(error)}"
                raise UserError(what, f"{path}:{line}", "mend that line") from None
            yield Assignment(key, value, f"{path}:{line}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration: {error}", path or "--config", "give the path of an existing text file") from None
    except yaml.MarkedYAMLError as error:
        place = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else path
        raise UserError(f"not YAML: {error.problem or _first_line(error)}", place, "mend that line") from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {_first_line(error)}", path, "mend the file") from None


def _leaves(node: Any, prefix: str, inside: tuple[Any, ...]) -> Iterator[tuple[str, Any, int]]:
    """(dotted key, node, line) of every value that is not a mapping itself; a section with nothing under it gives none."""
    import yaml

    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem="a configuration is lines of `key: value`", problem_mark=node.start_mark)
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if value in inside:
            raise yaml.MarkedYAMLError(problem=f"{name} holds itself", problem_mark=key.start_mark)
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{name}.", (*inside, node, value))
        elif not (name in SECTIONS and value.value == ""):
            yield name, value, key.start_mark.line + 1


def _value(key: str, node: Any) -> Any:
    """What a YAML node means for a key: the text itself where the key takes text, else what OmegaConf reads (1e-3 is a number)."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
        return None
    if takes_text(key) and isinstance(node, yaml.ScalarNode):
        return node.value
    pair = (yaml.ScalarNode("tag:yaml.org,2002:str", "value"), node)
    text = yaml.serialize(yaml.MappingNode("tag:yaml.org,2002:map", [pair]))
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(_first_line(error)) from None
    return tree["value"]


def takes_text(key: str) -> bool:
    """Whether a key is a text: 'no', '007' and '1e3' are then no number and no truth value."""
    return key in (keys := known_keys()) and str(keys[key].type) in ("str", "str | None")


def _assign(node: Any, assignment: Assignment) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, value, origin = assignment
    known = known_keys()
    section, _, option = key.partition(".")
    if key in known:
        path = key.split(".")
    elif section in OPEN_SECTIONS and option not in ("", "options") and all(option.split(".")):
        path = [section, "options", *option.split(".")]
    else:
        section_fix = f"{key} is a section: write {key}.<key>=value; --help {key} lists its keys" if key in SECTIONS else ""
        raise UserError(f"no such key: {key}", origin, section_fix or nearest(key, list(known)))
    for name in reversed(path):
        value = {name: value}
    try:
        return OmegaConf.merge(node, OmegaConf.create(value))
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: a mapping where a list belongs
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
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _expected(key: str) -> str:
    if key not in known_keys():
        return "see --help"
    kind = str(known_keys()[key].type).replace(" | None", ", or null")
    kind = kind.replace("list[PieceConfig]", "a list of pieces, as in [{kind: constant, epochs: 5}, {kind: cosine}]")
    if kind.startswith("Literal["):
        kind = f"one of {kind[len('Literal[') : -1]}"
    return f"{key} takes {kind}"


def _explain(error: Exception, value: Any) -> str:
    line = _first_line(error)
    return f"{value!r} ({line})" if "VALUE" not in line else repr(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _to_config(node: Any, origins: Origins) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(node)
    except (OmegaConfBaseException, RecursionError) as error:
        key = str(getattr(error, "full_key", None) or "").replace(".options.", ".")
        where = origins.where(key) if key else ""
        raise UserError(f"cannot resolve a value: {_first_line(error)}", where, "mend the ${...} in it") from None
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

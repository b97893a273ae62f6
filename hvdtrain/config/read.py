"""A YAML file and key=value words -> Config; every mistake names its key, its file:line, and the nearest right word."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hvdtrain.config.refusal import nearest, refusal
from hvdtrain.config.schema import OPEN_SECTIONS, SECTIONS, SHORTHANDS, Config
from hvdtrain.config.section import COMMAND_LINE, Provenance
from hvdtrain.config.yaml_reader import MOST_KEYS, check_key, check_text, compose, first_line, follow, leaves, read_text, short, value_of
from hvdtrain.errors import UserError

_OF_ONE_RUN = ("run", "resume", "comm.engine", "comm.address", "data.stage", "guard.max_time")


class Assignment(NamedTuple):
    key: str  # "batch.size"
    value: Any
    origin: str  # "configs/x.yaml:14" or "command line"


def configure(path: str | None, words: Sequence[str], former: Sequence[Assignment] | None = None) -> tuple[Config, Provenance]:
    """Defaults, then the file, then the words `key=value` or `--key=value`; the last one wins.

    With resume=RUN the resolved configuration of that run comes before all these: the same job goes on, but for what is said anew.
    It is read from RUN unless it is given as `former`.
    """
    given = assignments(path, words)
    former = read_former(given) if former is None else former
    _check_code(former, {a.key for a in given})
    return resolve([*former, *given])


def assignments(path: str | None, words: Sequence[str]) -> list[Assignment]:
    """What a file and words say, in order."""
    return [*(read_file(path) if path is not None else ()), *(read_word(SHORTHANDS.get(word, word)) for word in words)]


def read_former(given: Sequence[Assignment]) -> list[Assignment]:
    """The configuration of the run that resume=RUN names; none where it names none. Where and for how long it ran is not taken over."""
    resume = next((a.value for a in reversed(given) if a.key == "resume"), "auto")
    if resume in (None, "no", "auto") or not isinstance(resume, str):  # no text: resolve() says so
        return []
    return [a for a in read_file(str(expand(resume, "resume") / "config.yaml")) if a.key not in _OF_ONE_RUN]


def _check_code(former: Sequence[Assignment], said: set[str]) -> None:
    """Code that only a run folder names is not imported: the folder may be a stranger's."""
    for key, value, origin in former:
        if (
            key in ("model.name", "optim.name")
            and key not in said
            and set(".:") & set(f"{value}")
            and not f"{value}".startswith("torch.optim.")
        ):
            fix = f"if you trust it, say so: {key}={short(value)}"
            raise UserError(f"{key}={short(value)} imports code, and only the run folder names it", origin, fix)


def resolve(given: Sequence[Assignment]) -> tuple[Config, Provenance]:
    """The configuration that assignments make, the last of a key wins. Raises UserError where a key or a value is wrong."""
    tree: dict[str, Any] = {}
    provenance = Provenance()
    for key, value, origin in _followed(given):
        _merge(tree, _path(key, origin), value)
        provenance[key] = origin
    try:
        config = Config.model_validate(tree).with_provenance(provenance)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0], provenance) from None
    for key in ("run", "resume", "data.root", "data.stage"):
        expand(_at(config, key) or "", config.where(key))
    return config, provenance


def _followed(given: Sequence[Assignment]) -> Iterator[Assignment]:
    """With a key's value, the one that is given last or its default, in place of each ${key}."""
    last, known = {assignment.key: assignment.value for assignment in given}, dict[str, Any]()

    def look_up(key: str) -> Any:
        if key not in last and key not in known_keys():
            raise ValueError(f"no such key: {key}")
        return last[key] if key in last else _at(Config(), key)

    for assignment in given:
        key, value, origin = assignment
        try:
            yield Assignment(key, follow(value, look_up, known), origin)
        except ValueError as error:
            raise UserError(f"cannot resolve a value: {error}", f"{key}, {origin}", "mend the ${...} in it") from None


def read_word(word: str) -> Assignment:
    """One word of the command line."""
    import yaml

    key, equals, text = word.removeprefix("--").partition("=")
    if not equals or not key:
        raise UserError(
            f"cannot read the word '{short(word)}'", "command line", "write key=value, as in batch.size=128; --help lists the keys"
        )
    try:
        as_text = takes_text(check_key(key))
        value = check_text(text) if as_text and text != "null" else value_of(compose(text), as_text)
        return Assignment(key, None if value == "" and key != "data.stage" else value, COMMAND_LINE)  # data.stage=$UNSET is told
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"cannot read the value of '{short(word)}': {first_line(error)}", "command line", "quote it for the shell"
        ) from None


def read_file(path: str) -> Iterator[Assignment]:
    """Every value of a YAML file, with its line. Keys may be nested or dotted."""
    import yaml

    try:
        lines: dict[str, int] = {}
        for key, node, line in leaves(compose(read_text(path)), SECTIONS):
            if key in lines:
                raise UserError(f"{key} is given twice, in lines {lines[key]} and {line}", f"{path}:{line}", "keep one of them")
            lines[key] = line
            if len(lines) > MOST_KEYS:
                raise ValueError(f"more than {MOST_KEYS} keys")
            try:
                value = value_of(node, takes_text(key))
            except (yaml.YAMLError, ValueError) as error:
                what = f"cannot read the value of {key}: {short(getattr(error, 'problem', None) or first_line(error))}"
                raise UserError(what, f"{path}:{line}", "mend that line") from None
            yield Assignment(key, value, f"{path}:{line}")
    except yaml.MarkedYAMLError as error:
        place = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else path
        raise UserError(f"not YAML: {short(error.problem or first_line(error))}", place, "mend that line") from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {first_line(error)}", path, "mend the file") from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the configuration: {first_line(error)}"
        raise UserError(what, short(path) or "--config", "give the path of an existing text file") from None
    except ValueError as error:
        raise UserError(f"cannot read the configuration: {error}", path, "mend the file") from None


def takes_text(key: str) -> bool:
    """Whether a key is a text: 'no', '007' and '1e3' are then no number and no truth value."""
    return key in (keys := known_keys()) and keys[key].annotation in (str, str | None)


def _path(key: str, origin: str) -> list[str]:
    """The keys that lead to a value in the tree of the configuration. Raises UserError for an unknown key."""
    section, _, option = key.partition(".")
    known = known_keys()
    if key not in known and not (section in OPEN_SECTIONS and option not in ("", "options") and all(option.split("."))):
        section_fix = f"{key} is a section: write {key}.<key>=value; --help {key} lists its keys" if key in SECTIONS else ""
        raise UserError(f"no such key: {key}", origin, section_fix or nearest(key, list(known)))
    return key.split(".")


def _merge(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets a value in a tree of dicts; a dict is merged into a dict that is there already."""
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    if isinstance(value, dict) and value and isinstance(tree.get(path[-1]), dict):
        for name, inner in value.items():
            _merge(tree[path[-1]], [name], inner)
    else:
        tree[path[-1]] = value


@functools.cache
def known_keys() -> dict[str, FieldInfo]:
    """Every key of the schema: {"epochs": ..., "batch.size": ...}."""
    keys = {name: info for name, info in Config.model_fields.items() if name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{name}": info for name, info in kind.model_fields.items()}
    return keys


def expand(path: str | Path, where: str) -> Path:
    """The path with ~ or ~user written out."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise UserError(f"cannot find the folder {path}: {error}", where, "write its whole path") from None


def _at(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def to_yaml(config: Config) -> str:
    """The resolved configuration, in the form that --config reads."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump()))

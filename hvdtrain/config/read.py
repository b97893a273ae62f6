"""A YAML file and key=value arguments -> Config. Every error names the key, its file and line, and the nearest known key."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from hvdtrain.config.references import References
from hvdtrain.config.refusal import refusal
from hvdtrain.config.schema import OPEN_SECTIONS, RENAMED, SECTIONS, SHORTHANDS, Config, known_keys, takes_text
from hvdtrain.config.section import COMMAND_LINE, Provenance
from hvdtrain.config.yaml_reader import MOST_KEYS, Dumper, check_key, check_text, compose, leaves, read_text, value_of
from hvdtrain.errors import UserError, first_line, nearest, short

# Keys of one run, which a job that resumes it does not take over: where it ran, and for how long.
_OF_ONE_RUN = ("run", "resume", "comm.engine", "comm.address", "data.stage", "guard.max_time")


class Assignment(NamedTuple):
    key: str  # "batch.size"
    value: Any
    origin: str  # "configs/x.yaml:14" or "command line"


def configure(path: str | None, arguments: Sequence[str], resumed: Sequence[Assignment] | None = None) -> Config:
    """Defaults, then the file, then the arguments `key=value` or `--key=value`; the last one wins.

    With resume=RUN the resolved configuration of that run comes between the defaults and the file. It is read from RUN unless it is
    given as `resumed`. Raises UserError for what cannot be read, an unknown key and a wrong value.
    """
    assigned = assignments(path, arguments)
    resumed = read_resumed(assigned) if resumed is None else resumed
    _refuse_code(resumed, {assignment.key for assignment in assigned})
    return resolve([*resumed, *assigned])


def assignments(path: str | None, arguments: Sequence[str]) -> list[Assignment]:
    """What a file and the arguments set, in order."""
    from_file = read_file(path) if path is not None else ()
    return [*from_file, *(read_argument(SHORTHANDS.get(argument, argument)) for argument in arguments)]


def read_resumed(assigned: Sequence[Assignment]) -> list[Assignment]:
    """The configuration of the run that resume=RUN names, without the keys of that one run; nothing where no run is named."""
    resume = next((assignment.value for assignment in reversed(assigned) if assignment.key == "resume"), "auto")
    if resume in (None, "no", "auto") or not isinstance(resume, str):  # resolve() refuses what is not a text
        return []
    return [assignment for assignment in read_file(str(expand(resume, "resume") / "config.yaml")) if assignment.key not in _OF_ONE_RUN]


def _refuse_code(resumed: Sequence[Assignment], assigned: set[str]) -> None:
    """Code that only a run folder names is not imported: the folder may come from a stranger."""
    for key, value, origin in resumed:
        names_code = key in ("model.name", "optim.name") and set(".:") & set(str(value)) and not str(value).startswith("torch.optim.")
        if names_code and key not in assigned:
            fix = f"if you trust it, add the argument {key}={short(value)}"
            raise UserError(f"{key}={short(value)} imports code, and only the run folder names it", origin, fix)


def resolve(assigned: Sequence[Assignment]) -> Config:
    """The configuration that assignments make, the last of a key wins. Raises UserError where a key or a value is wrong."""
    tree: dict[str, Any] = {}
    provenance = Provenance()
    for key, value, origin in _without_references(assigned):
        _check_known(key, origin)
        _merge(tree, key.split("."), value)
        provenance[key] = origin
    try:
        config = Config.model_validate(tree).with_provenance(provenance)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0], provenance) from None
    for key in ("run", "resume", "data.root", "data.stage"):
        expand(_value(config, key) or "", config.where(key))
    return config


def _without_references(assigned: Sequence[Assignment]) -> Iterator[Assignment]:
    """The assignments with the last value of a key, or its default, in place of each `${key}`."""
    last = {assignment.key: assignment.value for assignment in assigned}

    def look_up(key: str) -> Any:
        if key not in last and key not in known_keys():
            raise ValueError(f"no such key: {key}")
        return last[key] if key in last else _value(Config(), key)

    references = References(look_up)
    for key, value, origin in assigned:
        try:
            yield Assignment(key, references.replace(value), origin)
        except ValueError as error:
            raise UserError(f"cannot resolve a value: {error}", f"{key}, {origin}", "correct the ${...} in it") from None


def _check_known(key: str, origin: str) -> None:
    """Raises UserError where the schema has no such key, and no option can be called so."""
    section, _, option = key.partition(".")
    if key in known_keys() or (section in OPEN_SECTIONS and option.split(".")[0] not in ("", "options") and all(option.split("."))):
        return
    if key in SECTIONS:
        fix = f"{key} is a section: write {key}.<key>=value; --help {key} lists its keys"
    else:
        fix = RENAMED.get(key) or nearest(key, list(known_keys()))
    raise UserError(f"no such key: {key}", origin, fix)


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


def read_argument(argument: str) -> Assignment:
    """`key=value` or `--key=value`. Nothing after the equals sign, or null, unsets the key. Raises UserError where it cannot be read."""
    key, equals, text = argument.removeprefix("--").partition("=")
    if not equals or not key:
        fix = "write key=value, as in batch.size=128; --help lists the keys"
        raise UserError(f"cannot read the argument '{short(argument)}'", COMMAND_LINE, fix)
    try:
        value: Any
        if not takes_text(check_key(key)):
            value = value_of(compose(text), as_text=False)
        elif text == "null" or (text == "" and key != "data.stage"):  # an empty data.stage is an unset variable, which has its own error
            value = None
        else:
            value = check_text(text)
    except (yaml.YAMLError, ValueError) as error:
        what = f"cannot read the value of '{short(argument)}': {first_line(error)}"
        raise UserError(what, COMMAND_LINE, "quote it for the shell") from None
    return Assignment(key, value, COMMAND_LINE)


def read_file(path: str) -> Iterator[Assignment]:
    """Every value of a YAML file, with its line; keys may be nested or dotted. Raises UserError where the file cannot be read."""
    try:
        yield from _assignments_of(path, read_text(path))
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else path
        raise UserError(f"not YAML: {short(error.problem or first_line(error))}", where, "correct that line") from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {first_line(error)}", path, "correct the file") from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the configuration: {first_line(error)}"
        raise UserError(what, short(path) or "--config", "give the path of an existing text file") from None
    except ValueError as error:
        raise UserError(f"cannot read the configuration: {error}", path, "correct the file") from None


def _assignments_of(path: str, text: str) -> Iterator[Assignment]:
    lines: dict[str, int] = {}
    for key, node, line in leaves(compose(text), SECTIONS):
        origin = f"{path}:{line}"
        if key in lines:
            raise UserError(f"{key} is given twice, in lines {lines[key]} and {line}", origin, "keep one of them")
        lines[key] = line
        if len(lines) > MOST_KEYS:
            raise ValueError(f"more than {MOST_KEYS} keys")
        try:
            value = value_of(node, takes_text(key))
        except (yaml.YAMLError, ValueError) as error:
            problem = short(getattr(error, "problem", None) or first_line(error))
            raise UserError(f"cannot read the value of {key}: {problem}", origin, "correct that line") from None
        yield Assignment(key, value, origin)


def expand(path: str | Path, where: str) -> Path:
    """The path with ~ or ~user replaced. Raises UserError where there is no such user or no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"cannot find the folder {path}: {error}", where, "write its whole path") from None


def _value(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def to_yaml(config: Config) -> str:
    """The resolved configuration, in the form that --config reads."""
    return yaml.dump(config.model_dump(), Dumper=Dumper, sort_keys=False, allow_unicode=True)

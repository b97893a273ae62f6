"""A YAML file and key=value words -> Config; every mistake names its key, its file:line, and the nearest right word."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.limits import LIMITS
from hvdtrain.config.schema import OPEN_SECTIONS, SECTIONS, SHORTHANDS, Config
from hvdtrain.config.yaml_reader import MOST_KEYS, check_key, check_text, compose, first_line, follow, leaves, read_text, short, value_of
from hvdtrain.errors import UserError

COMMAND_LINE = "command line"  # the origin of a key=value word
_OF_ONE_RUN = ("run", "resume", "comm.engine", "comm.address", "data.stage", "guard.max_time")


class Assignment(NamedTuple):
    key: str  # "batch.size"
    value: Any
    origin: str  # "configs/x.yaml:14" or "command line"


class Provenance(dict[str, str]):
    """key -> where it was set; says the key as well, ready for UserError.where."""

    def where(self, key: str) -> str:
        return f"{key}, {self.get(key, 'default')}"


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
    """The configuration that assignments make, the last of a key wins."""
    from omegaconf import OmegaConf  # 0.2 s, which --help does without

    node: Any = OmegaConf.structured(Config)
    provenance = Provenance()
    for assignment in _followed(given):
        node = _assign(node, assignment)
        provenance[assignment.key] = assignment.origin
    config = _to_config(node, provenance)
    _check_limits(config, provenance)
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
        return OmegaConf.unsafe_merge(node, OmegaConf.create(value))  # unlike merge() without a copy of all for each key
    except (OmegaConfBaseException, TypeError, OverflowError) as error:  # a mapping where a list belongs; int(inf)
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
    line = first_line(error)
    return f"{short(repr(value))} ({line})" if "VALUE" not in line else short(repr(value))


def _to_config(node: Any, provenance: Provenance) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "").replace(".options.", ".")
        raise UserError(f"cannot take a value: {first_line(error)}", provenance.where(key) if key else "", "see --help") from None
    assert isinstance(config, Config), type(config)
    return config


def _check_limits(config: Config, provenance: Provenance) -> None:
    for key, (low, high, words) in LIMITS.items():
        value = _at(config, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key} is {value}", provenance.where(key), f"give {words}")
    for key in ("run", "resume", "data.root", "data.stage"):
        expand(_at(config, key) or "", provenance.where(key))


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

    tree = dataclasses.asdict(config)
    for section in OPEN_SECTIONS:
        tree[section] |= tree[section].pop("options")
    return OmegaConf.to_yaml(OmegaConf.create(tree))

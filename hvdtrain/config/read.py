"""Reads a YAML file and key=value arguments into a Config. Every error names the key, its file and
line, and the nearest known key."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from hvdtrain.config.of_a_run import is_in_a_run_folder, not_in_this_copy
from hvdtrain.config.plugins import of_a_script
from hvdtrain.config.schema import (
    OPEN_SECTIONS,
    OTHER_NAMES,
    SECTIONS,
    SHORTHANDS,
    Config,
    known_keys,
    of_sections,
    takes_text,
)
from hvdtrain.config.sections.extra_keys import unused_keys
from hvdtrain.config.sections.section import COMMAND_LINE, DEFAULT, Provenance, go_on, is_object
from hvdtrain.config.yaml_reader import (
    MOST_BYTES,
    MOST_KEYS,
    REFERENCE,
    Dumper,
    References,
    check_key,
    check_text,
    compose,
    leaves,
    read_text,
    value_of,
)
from hvdtrain.core.folder import NO_LINKS, Folder, WrongKind
from hvdtrain.errors import UserError, first_line, short

# Keys that a resumed job does not inherit, because they describe one run: where it ran, and for how
# long.
_OF_ONE_RUN = ("run", "resume", "comm.engine", "comm.address", "data.stage", "guard.max_time")

MOST_NAME_BYTES = 255  # of a file or folder, as file systems allow
MOST_PATH_BYTES = (
    3800  # the system allows 4095, but the names of checkpoints within a run folder are added
)


# returns the keys that nothing reads in a configuration
Unread = Callable[[Config], Iterable[str]]


class Assignment(NamedTuple):
    key: str  # "batch.size"
    value: Any
    origin: str  # "configs/x.yaml:14" or "command line"


def configure(
    path: str | None,
    arguments: Sequence[str],
    resumed: Sequence[Assignment] | None = None,
    unread: Unread = lambda config: (),
) -> Config:
    """Merges the defaults, the file and the arguments `key=value` or `--key=value`, in this order.

    With resume=RUN the resolved configuration of that run comes between the defaults and the file.
    It is read from RUN unless `resumed` contains it. Keys of `unread` that only a run's record sets
    are dropped. Raises UserError for unreadable input, an unknown key or a wrong value.
    """
    assigned = assignments(path, arguments)
    resumed = _without_owner(read_resumed(assigned) if resumed is None else resumed, assigned)
    typed = [assignment for assignment in assigned if assignment.origin == COMMAND_LINE]
    from_a_run = path is not None and _is_of_a_run(path)
    if path is not None and is_in_a_run_folder(path):
        assigned = [
            *_of_this_copy(one for one in assigned if one.origin != COMMAND_LINE),
            *typed,
        ]
    every = [*resumed, *assigned]
    recorded = Recorded(every, typed if from_a_run else assigned)
    config = resolve_recorded(every, recorded.keys, unread)
    recorded.refuse_code(config)
    recorded.refuse_acts(config)
    return config


def assignments(path: str | None, arguments: Sequence[str]) -> list[Assignment]:
    """Returns the values that a file and the arguments set, in order."""
    from_file = read_file(path) if path is not None else ()
    rest = [arguments[index + 1 :] for index in range(len(arguments))]
    # `epochs = 3` is three arguments
    following = [
        "".join(others[: 2 if others[0] == "=" else 1]) if others else "" for others in rest
    ]
    return [
        *from_file,
        *(
            read_argument(SHORTHANDS.get(one, one), then)
            for one, then in zip(arguments, following, strict=True)
        ),
    ]


def read_resumed(assigned: Sequence[Assignment]) -> list[Assignment]:
    """Returns the configuration of the run that resume=RUN names, without _OF_ONE_RUN; nothing
    without resume. Raises UserError if the run folder does not exist or its configuration cannot be
    read.
    """
    _, resume, origin = next(
        (each for each in reversed(assigned) if each.key == "resume"),
        Assignment("resume", "auto", DEFAULT),
    )
    if resume in (None, "no", "auto") or not isinstance(
        resume, str
    ):  # resolve() rejects anything but a string
        return []
    folder = expand(resume, "resume")
    if not os.path.isdir(folder):
        fix = "give the folder that a job's last line names: run folder: DIR"
        raise UserError(f"there is no run folder {short(resume)}", f"resume, {origin}", fix)
    return [
        assignment for assignment in read_run_config(folder) if assignment.key not in _OF_ONE_RUN
    ]


# a key that older runs lack -> the key it belongs to, and the value for the older behaviour
_SINCE = {"model.lora_train": ("model.lora", ["*"])}

# key -> the key it belongs to, and the value without which it has no effect
_OWNERS = {key: owner for owners in of_sections("owners") for key, owner in owners.items()}


def _without_owner(
    resumed: Sequence[Assignment], assigned: Sequence[Assignment]
) -> list[Assignment]:
    """Drops keys of a resumed run whose owner is off: parallel.sequence after parallel.tensor=1."""
    now = {assignment.key: assignment.value for assignment in assigned}
    resumed = [
        one._replace(value=without_objects(one.value)) if one.key == "hooks" else one
        for one in resumed
    ]
    return [
        one
        for one in resumed
        if one.key not in _OWNERS or now.get(_OWNERS[one.key][0]) != _OWNERS[one.key][1]
    ]


def without_objects(hooks: Any) -> Any:
    """Drops recorded hooks that a script passed as objects, because another script may define
    them."""
    return (
        [name for name in hooks if not is_object(f"{name}")] if isinstance(hooks, list) else hooks
    )


# keys whose value may be an import path
CODE = (
    "data.name",
    "task.name",
    "model.name",
    "optim.name",
    "recipe.function",
    "hooks",
)
ACTS = {  # key -> the effect of its value outside the run folder
    **dict.fromkeys(
        ("run", "data.stage", "data.cache", "data.source_options.cache"), "is where a job writes"
    ),
    "comm.address": "is where the ranks connect",
    "model.download": "lets a model's code download",
}


_ONLY_RECORDED = " imports code, and only the run folder names it"


def _untrusted(found: Mapping[str, str]) -> UserError:
    """Returns the error for arguments that import code, each with where the run sets it."""
    first, *others = found
    if not others:
        return UserError(
            f"{first}{_ONLY_RECORDED}",
            found[first],
            f"if you trust it, add the argument {first}",
        )
    return UserError(
        f"{', '.join([first, *others[:-1]])} and {others[-1]} import code, and only the run "
        "folder names them",
        ", ".join(found.values()),
        f"if you trust them, add the arguments {' '.join(shlex.quote(one) for one in found)}",
    )


class Recorded:
    """The keys that only a run's record sets, including through references to its other keys. The
    record may come from a stranger."""

    def __init__(self, every: Sequence[Assignment], trusted: Sequence[Assignment]) -> None:
        """every: all assignments of a configuration, in order; trusted: assignments by the user."""
        self._last = {assignment.key: assignment for assignment in every}
        self.keys = self._last.keys() - {assignment.key for assignment in trusted}

    def refuse_code(self, config: Config) -> None:
        """Raises UserError that names all import paths that only the record sets. Values of
        `config` have no references."""
        found = {}
        for key in CODE:
            value = _value(config, key)
            if (
                not self._says(key)
                or not set(".:") & set(f"{value}")
                or f"{value}".startswith("torch.optim.")
            ):
                continue
            origin = self._last[key].origin
            if is_object(f"{value}"):
                what = f"{key}={short(value)} is an object that only its script defines"
                raise UserError(what, origin, go_on(key.partition(".")[0]))
            shown = short(value if isinstance(value, str) else json.dumps(value))
            if fix := of_a_script(f"{value}"):
                raise UserError(f"{key}={shown}{_ONLY_RECORDED}", origin, fix)
            found[f"{key}={shown}"] = origin
        if found:
            raise _untrusted(found)

    def refuse_acts(self, config: Config) -> None:
        """Raises UserError if only the record sets where the job writes or connects, or lets it
        download."""
        for key, does in ACTS.items():
            value = _value(config, key)
            if value is None or value is False or not self._says(key):
                continue
            shown = f"{key}={short('true' if value is True else value)}"
            origin = next(
                self._last[name].origin
                for name in self._last
                if name == key or key.startswith(f"{name}.")
            )
            fix = f"if you want that, add the argument {shown}; if not, {key}={_elsewhere(key)}"
            raise UserError(
                f"{shown} {does}, but it is set only in the configuration of a run", origin, fix
            )

    def _says(self, key: str) -> bool:
        """Whether the record sets its value or a part of it."""
        reached = [name for name in self._last if name == key or key.startswith(f"{name}.")]
        for name in reached:  # the loop appends the keys that references lead to
            referred = [
                OTHER_NAMES.get(other, other)
                for other in REFERENCE.findall(f"{self._last[name].value}")
            ]
            reached += [other for other in referred if other in self._last and other not in reached]
        return not self.keys.isdisjoint(reached)


def _is_of_a_run(path: str) -> bool:
    """Whether a file is the record of a run, judged by its name or the files beside it. It may come
    from a stranger."""
    return os.path.basename(path) == "config.yaml" or is_in_a_run_folder(path)


def _elsewhere(key: str) -> str:
    if key == "run":
        return "ANOTHER"
    if key.endswith("download"):
        return "false"
    return "null"


def resolve(assigned: Sequence[Assignment]) -> Config:
    """Builds a configuration from assignments; the last of a key wins. Raises UserError for a wrong
    key or value."""
    tree: dict[str, Any] = {}
    provenance = Provenance()
    for key, value, origin in _without_references(assigned):
        _check_known(key, value, origin)
        _merge(tree, key.split("."), value)
        provenance[key] = origin
    try:
        config = Config.model_validate(tree).with_provenance(provenance)
    except ValidationError as error:
        from hvdtrain.config.refusal import refusal

        # report a misspelt key first, because it may cause the other errors
        errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
        raise refusal(errors[0], provenance) from None
    for key in ("run", "resume", "data.root", "data.stage"):
        expand(_value(config, key) or "", config.where(key))
    return config


def resolve_recorded(
    assigned: Sequence[Assignment], recorded: Collection[str], unread: Unread
) -> Config:
    """Resolves assignments without recorded keys that have no effect, because the user did not set
    them and cannot remove them."""
    config = resolve(assigned)
    dropped = set(recorded).intersection(unread(config)) if recorded else set()
    if not dropped:
        return config
    kept = [one for one in assigned if one.key not in dropped]
    return resolve_recorded(kept, set(recorded) - dropped, unread)


def _without_references(assigned: Sequence[Assignment]) -> Iterator[Assignment]:
    """Yields the assignments with each `${key}` replaced by the last value of that key, or its
    default."""
    last = {assignment.key: assignment.value for assignment in assigned}

    def look_up(name: str) -> Any:
        key = OTHER_NAMES.get(name, name)
        if key not in last and key not in known_keys():
            raise ValueError(f"no such key: {key}")
        return last[key] if key in last else _value(Config(), key)

    references = References(look_up)
    for key, value, origin in assigned:
        try:
            yield Assignment(key, references.replace(value), origin)
        except ValueError as error:
            raise UserError(
                f"cannot resolve a value: {error}", f"{key}, {origin}", "correct the ${...} in it"
            ) from None


def _check_known(key: str, value: Any, origin: str) -> None:
    """Raises UserError if the schema does not have the key, and no option can have its name."""
    if not _is_known(key):
        from hvdtrain.config.refusal import fix_of_key

        raise UserError(f"no such key: {key}", origin, fix_of_key(key, value))


def _is_known(key: str) -> bool:
    """Whether the schema has a key, or an option can have its name."""
    section, _, option = key.partition(".")
    return key in known_keys() or (
        section in OPEN_SECTIONS
        and option.split(".")[0] not in ("", "options")
        and all(option.split("."))
    )


def _merge(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets a value in a tree of dicts; merges a dict into an existing dict."""
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    if isinstance(value, dict) and value and isinstance(tree.get(path[-1]), dict):
        for name, inner in value.items():
            _merge(tree[path[-1]], [name], inner)
    else:
        tree[path[-1]] = value


def read_argument(argument: str, following: str = "") -> Assignment:
    """Reads `key=value` or `--key=value`. Nothing after the equals sign, or null, unsets the key.

    Raises UserError if it cannot be read; `following`, the next argument, may be the value of
    `--key value`.
    """
    key, equals, text = argument.removeprefix("--").partition("=")
    key = OTHER_NAMES.get(key, key)
    if not equals or not key:
        from hvdtrain.config.refusal import fix_of_argument

        raise UserError(
            f"cannot read the argument '{short(argument)}'",
            COMMAND_LINE,
            fix_of_argument(argument, following),
        )
    if not text and following and "=" not in following and not following.startswith("-"):
        raise UserError(
            f"'{short(argument)}' has no value",
            COMMAND_LINE,
            f"write {key}={short(following)}, without spaces",
        )
    try:
        value: Any
        if not takes_text(check_key(key)):
            value = value_of(compose(text), as_text=False)
        elif text == "null" or (
            text == "" and key != "data.stage"
        ):  # an empty data.stage comes from an unset variable; it has a separate error
            value = None
        else:
            value = check_text(text)
    except (yaml.YAMLError, ValueError) as error:
        what = f"cannot read the value of '{short(argument)}': {first_line(error)}"
        raise UserError(what, COMMAND_LINE, "quote it for the shell") from None
    return Assignment(key, value, COMMAND_LINE)


def read_run_config(run: Path) -> Iterator[Assignment]:
    """Reads the config.yaml of a run folder, which must be a file of that folder; a link is
    rejected."""

    def read(path: str) -> str:
        try:
            with Folder.open(run) as folder:
                return folder.read("config.yaml", MOST_BYTES).decode("utf-8")
        except WrongKind as error:
            raise UserError(f"{path} is {error.strerror}", path, NO_LINKS) from None
        except OSError as error:  # with the complete path
            raise OSError(error.errno, error.strerror, path) from None

    seen = {}
    for one in _of_this_copy(read_file(str(run / "config.yaml"), read)):
        seen[one.key] = one
        yield one
    for key, (owner, value) in _SINCE.items():
        if key not in seen and owner in seen and seen[owner].value:
            yield Assignment(key, value, seen[owner].origin)


def _of_this_copy(recorded: Iterable[Assignment]) -> Iterator[Assignment]:
    """Yields the recorded keys of a run. Raises UserError for a key that this copy of hvdtrain
    lacks; a run records the keys of an extra if it uses one of them."""
    for one in recorded:
        if not _is_known(one.key):
            from hvdtrain.config.words_of_other_tools import right_key

            if right_key(one.key, one.value):  # a former name, or a name from another tool
                _check_known(*one)
            raise not_in_this_copy(*one)
        yield one


def read_file(path: str, read: Callable[[str], str] = read_text) -> Iterator[Assignment]:
    """Yields every value of a YAML file with its line; keys may be nested or dotted. Raises
    UserError if the file cannot be read."""
    try:
        yield from _assignments_of(path, read(path))
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else path
        raise UserError(
            f"not YAML: {short(error.problem or first_line(error))}", where, "correct that line"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {first_line(error)}", path, "correct the file") from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the configuration: {first_line(error)}"
        raise UserError(
            what, short(path) or "--config", "give the path of an existing text file"
        ) from None
    except ValueError as error:
        raise UserError(
            f"cannot read the configuration: {error}", path, "correct the file"
        ) from None


def _assignments_of(path: str, text: str) -> Iterator[Assignment]:
    lines: dict[str, int] = {}
    for name, node, line in leaves(compose(text), SECTIONS):
        key = OTHER_NAMES.get(name, name)
        origin = f"{path}:{line}"
        if key in lines:
            raise UserError(
                f"{key} is given twice, in lines {lines[key]} and {line}",
                origin,
                "keep one of them",
            )
        lines[key] = line
        if len(lines) > MOST_KEYS:
            raise ValueError(f"more than {MOST_KEYS} keys")
        try:
            value = value_of(node, takes_text(key))
        except (yaml.YAMLError, ValueError) as error:
            problem = short(getattr(error, "problem", None) or first_line(error))
            raise UserError(
                f"cannot read the value of {key}: {problem}", origin, "correct that line"
            ) from None
        yield Assignment(key, value, origin)


def expand(path: str | Path, where: str) -> Path:
    """Expands ~ or ~user in a path. Raises UserError if the user or the home does not exist, or no
    file can have such a name."""
    longest = max((len(os.fsencode(name)) for name in Path(path).parts), default=0)
    if longest > MOST_NAME_BYTES or len(os.fsencode(path)) > MOST_PATH_BYTES:
        what = (
            f"a name of {longest} bytes"
            if longest > MOST_NAME_BYTES
            else f"a path of {len(os.fsencode(path))} bytes"
        )
        fix = f"a name has at most {MOST_NAME_BYTES} bytes, a path {MOST_PATH_BYTES}"
        raise UserError(f"{what}: {short(f'{path}', 40)}", where, fix)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"cannot find the folder {path}: {error}", where, "write its whole path"
        ) from None


def _value(config: Config, key: str) -> Any:
    """Returns the value of a key or of a plugin's option; None if it does not exist."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def to_yaml(config: Config) -> str:
    """Formats the resolved configuration in the format that --config reads."""
    return _dump(config.model_dump())


def to_record(config: Config, leave_out: Collection[str], only: dict[str, Any] | None) -> str:
    """Formats the configuration without the sections in `leave_out` and without unused keys of
    extras, so that a copy of hvdtrain without the extra can read it. only: the keys to include, as
    a tree of True."""
    tree = config.model_dump(include=only, exclude=set(leave_out))
    for section, name in unused_keys(config):
        tree.get(section, {}).pop(name, None)
        if not tree.get(section, True):
            del tree[section]
    return _dump(tree)


def _dump(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)

"""What to write instead of an unknown key or argument: the word that is meant, or the known ones."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.config.other_words import assignment_of, data_of_path, right_key, without_a_key
from hvdtrain.config.schema import SECTIONS, known_keys
from hvdtrain.errors import closest, nearest, short

_OPTIONS = ("--config", "--help", "--max-time", "--print-config", "--version")  # of the command line, beside key=value
_HELP = "hvdtrain --help; --help KEY shows one key, COMMAND --help a command"


def fix_of_key(key: str, value: Any = None) -> str:
    """What to write instead of an unknown key, or of a section with a value."""
    if key in SECTIONS:
        return _fix_of_section(key, value)
    if no_key := without_a_key(key):
        return no_key
    if right := right_key(key, value):
        return f"did you mean {right}?"
    section, _, option = key.partition(".")
    beside = [name.partition(".")[2] for name in known_keys() if name.startswith(f"{section}.")]
    if not beside:
        return nearest(key, list(known_keys()), [name for name in known_keys() if "." not in name] + [f"{name}.<key>" for name in SECTIONS])
    if close := closest(option, beside):
        return f"did you mean {section}.{close}?"
    return nearest(option, list(known_keys()), [f"{section}.{name}" for name in beside])


def _fix_of_section(section: str, value: Any) -> str:
    """What to write instead of a section with a value: model.name=mlp for model=mlp."""
    data = data_of_path(value) if section == "data" else None
    if data is not None:
        return f"data is a section: write {data}; --help data lists its keys"
    right = right_key(section, value) or f"{section}.<key>"
    shown = "value" if isinstance(value, (dict, list)) or right.endswith("<key>") else short(value)
    return f"{section} is a section: write {right if '=' in right else f'{right}={shown}'}; --help {section} lists its keys"


def fix_of_argument(argument: str, following: str) -> str:
    """What to write instead of an argument that is not key=value."""
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
        return "write key=value, as in batch.size=128; --help keys lists them"
    is_value = following and "=" not in following and not following.startswith("-")
    return f"write {key}" if "=" in key else f"write {key}={short(following) if is_value else 'VALUE'}"


def _ends_with(word: str) -> str | None:
    """The key of a section that has this name: optim.momentum."""
    return next((key for key in known_keys() if key.rpartition(".")[2] == word), None)


def _assignment_of_path(argument: str) -> str | None:
    """What a configuration, a run folder or data are written behind; None for what is no path."""
    if argument.endswith((".yaml", ".yml")):
        return f"--config {short(argument)}"
    if os.path.isfile(os.path.join(argument, "config.yaml")):
        return f"resume={short(argument)}"
    return data_of_path(argument)

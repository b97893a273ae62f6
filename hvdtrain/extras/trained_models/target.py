"""What --force may replace: no input of the command, and folders only as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.config.read import read_run_config
from hvdtrain.errors import UserError

_PATHS = ("data.root", "data.tokenizer", "model.weights", "model.name", "model.config")


def refuse_inputs(
    to: str | Path, run: str | Path, words: Sequence[str], options: Mapping[str, str | None]
) -> None:
    """Raises UserError if a target is an input or a folder with one: the run, the paths that its
    configuration or `words` set, or one of the options. options: {"--data": its path}."""
    target = Path(os.path.expanduser(to))
    for key, value in (("RUN", str(run)), *options.items(), *_of_run(run), *_of_words(words)):
        path = value and _existing(key, value)
        if path and _is_in(path, target):
            what = f"{to} is {key}={value}, or a folder that contains it"
            raise UserError(f"{what}; --force never replaces an input", "--to", "give another name")


def _of_run(run: str | Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(UserError, OSError):  # the command says so later
        for one in read_run_config(Path(os.path.expanduser(run))):
            if one.key in _PATHS and isinstance(one.value, str):
                yield one.key, one.value


def _of_words(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, _, value = word.partition("=")
        if key in _PATHS:
            yield key, value


def _existing(key: str, value: str) -> Path | None:
    """Returns the path that an input names; None if there is none."""
    text = value.partition(":")[2] if key == "model.name" else value
    path = Path(os.path.expanduser(text))
    return path if text and os.path.exists(path) else None


def _is_in(path: Path, target: Path) -> bool:
    """Whether a path is the target, also by another name, or in it."""
    if not os.path.exists(target):
        return False
    whole = path.resolve()
    return any(os.path.samefile(one, target) for one in (path, whole, *whole.parents))

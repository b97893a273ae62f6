"""What the arguments of a job set, its --config files and the run that it resumes included, as far as `launch` has to know it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.config.read import expand, read_argument, read_file
from hvdtrain.errors import UserError

_RUN_CONFIG = "config.yaml"


def value_of(job: Sequence[str], key: str, default: Any = None) -> Any:
    """The value of a key: the last argument that sets it, else the last --config file, else the run folder that resume= names.

    Not for a script, which may call hvdtrain.train() with anything. What cannot be read here sets nothing: the job says it.
    """
    value = default
    for path in _files(job):
        try:
            value = next((assigned.value for assigned in read_file(path) if assigned.key == key), value)
        except UserError:
            continue
    return _of_arguments(job, key, value)


def _of_arguments(job: Sequence[str], key: str, default: Any) -> Any:
    value = default
    for argument in job:
        if argument.removeprefix("--").startswith(f"{key}="):
            try:
                value = read_argument(argument).value
            except UserError:
                continue
    return value


def _files(job: Sequence[str]) -> list[str]:
    """Configuration files of the job, those that count less first."""
    resumed = _of_arguments(job, "resume", None)
    files = [str(expand(resumed, "resume") / _RUN_CONFIG)] if isinstance(resumed, str | Path) and str(resumed) not in ("auto", "no") else []
    files += [following for argument, following in pairwise(job) if argument == "--config"]
    return files + [argument.partition("=")[2] for argument in job if argument.startswith("--config=")]

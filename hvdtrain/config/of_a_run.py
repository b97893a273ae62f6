"""Keys that the config.yaml of a run has recorded."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.errors import UserError, short

_RUN_FOLDER = (".hvdtrain", "events.jsonl", "checkpoints")  # every run folder contains one of these


def is_in_a_run_folder(path: str) -> bool:
    """Whether a file is beside what only run folders contain."""
    folder = os.path.dirname(path)
    return any(os.path.lexists(os.path.join(folder, other)) for other in _RUN_FOLDER)


def is_recorded(origin: str) -> bool:
    """Whether a value was set by a line of a run's config.yaml."""
    path, _, line = origin.rpartition(":")
    is_config = line.isdecimal() and os.path.basename(path) == "config.yaml"
    return is_config and is_in_a_run_folder(path)


def not_in_this_copy(key: str, value: Any, origin: str) -> UserError:
    """Returns the error for a recorded key that this copy of hvdtrain lacks."""
    return UserError(
        f"the run has {key}={short(f'{value}')}, but this installation of hvdtrain does not have "
        "that key",
        origin,
        "install the extra that defines it: `hvdtrain extras` lists the installed ones",
    )

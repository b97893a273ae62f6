"""The id under which a tracker knows a job, kept in the run folder: a resumed job continues the tracker's run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hvdtrain.core.folder import Folder
from hvdtrain.events.log import Event

_MOST_BYTES = 1000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")  # it names files and folders, and is part of an address


def load_run_id(path: Path, first: Event) -> str | None:
    """The id that an earlier start of the job saved; None without one, or where the first event is at step 0: the job starts over."""
    if first.step == 0:
        return None
    try:
        with Folder.open(path.parent) as folder:
            run_id = json.loads(folder.read(path.name, _MOST_BYTES))["run_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing, or cut off by a crash: a new run is better than none
        return None
    return run_id if isinstance(run_id, str) and _ID.fullmatch(run_id) else None


def save_run_id(path: Path, run_id: str) -> None:
    """Raises OSError where the file cannot be written."""
    with Folder.open(path.parent) as folder:
        folder.replace(path.name, (json.dumps({"run_id": run_id}) + "\n").encode())

"""The id under which a tracker knows a job, kept in the run folder: a resumed job continues the tracker's run."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.events.log import Event


def load_run_id(path: Path, first: Event) -> str | None:
    """The id that an earlier start of the job saved; None without one, or where the first event is at step 0: the job starts over."""
    if first.step == 0:
        return None
    try:
        run_id = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):  # missing, or cut off by a crash: a new run is better than none
        return None
    return run_id if isinstance(run_id, str) else None


def save_run_id(path: Path, run_id: str) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")

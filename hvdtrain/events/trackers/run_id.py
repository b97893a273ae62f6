"""The id under which a tracker knows a job, kept in the run folder so that a resumed job goes on with it."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.events.log import Event


def former(path: Path, first: Event) -> str | None:
    """The id of the runs before this one; None where there was none, or where the job's first event is at step 0: it begins anew."""
    if first.step == 0:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or cut off by a crash: a new run is better than none
        return None
    return found if isinstance(found, str) else None


def keep(path: Path, run_id: str) -> None:
    path.write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")

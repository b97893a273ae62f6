"""What differs between runs: keys of their configurations, and the environments in which they ran,
as their events "start" say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.sections.extra_keys import defaults
from hvdtrain.events.redaction import redact_urls
from hvdtrain.records.run import RunRecord

_MOST_LETTERS = 10_000  # of a value
_OF_JOB = ("ranks", "engine", "device")  # fields of the event itself
# of one start: they differ between any two jobs
_OF_ONE_START = (
    *("command", "folder", "$SLURM_JOB_ID", "$SLURM_ARRAY_TASK_ID"),
    *("$PBS_JOBID", "$LSB_JOBID", "$JOB_ID", "$FLUX_JOB_ID"),
)
_SHORT_DIGITS = 12  # of a commit


def differing_keys(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Returns (key, its value in each run) for keys whose values differ, except `run`. None if a
    run lacks the key; the default for a key of an extra, which a run records only if it uses it."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "run")
    values = {
        key: [run.config.get(key, defaults().get(key) if run.config else None) for run in runs]
        for key in keys
    }
    return [
        (key, of_runs)
        for key, of_runs in values.items()
        if len({json.dumps(value, sort_keys=True, default=str) for value in of_runs}) > 1
    ]


def environment_of(run: RunRecord) -> dict[str, str]:
    """Returns name -> value of the last start, for people; empty for a run that has none. Packages
    and variables have a row each."""
    found = run.start_event.get("environment")
    if not isinstance(found, Mapping) or not found:
        return {}
    rows = {name: _text(run.start_event.get(name)) for name in _OF_JOB}
    for name, value in found.items():
        if name == "code":
            rows |= _of_code(value)
        elif isinstance(value, Mapping):
            inner_name = {"packages": "", "variables": "$", "files": "file "}.get(name, f"{name} ")
            rows |= {f"{inner_name}{inner}": _text(one) for inner, one in value.items()}
        else:
            rows[name] = _text(value)
    return {_text(name): value for name, value in rows.items() if value}


def differing_environment(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Returns (name, its value in each run) where the values differ, except the command line, the
    folder and the number of the job; empty if a run has no environment."""
    found = [environment_of(run) for run in runs]
    if not all(found):
        return []
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: [one.get(name, "") for one in found] for name in names}
    return [
        (name, of_runs)
        for name, of_runs in values.items()
        if len(set(of_runs)) > 1 and name not in _OF_ONE_START
    ]


def _of_code(value: Any) -> dict[str, str]:
    """Returns a row for each repository: its commit and its changes."""
    rows = {}
    for number, one in enumerate(value if isinstance(value, list) else [], start=1):
        if not isinstance(one, Mapping):
            continue
        changed = one.get("changed")
        count = len(changed) if isinstance(changed, list) else 0
        files = "1 changed file" if count == 1 else f"{count} changed files"
        changes = f", {files} ({_text(one.get('digest'))})" if count else ""
        commit = _text(one.get("commit"))[:_SHORT_DIGITS] or _text(one.get("problem"))
        rows["code" if number == 1 else f"code {number}"] = (
            f"{_text(one.get('folder'))} at {commit}{changes}"
        )
    return rows


def _text(value: Any) -> str:
    """Formats a value of JSON, without logins of URLs."""
    if value is None or value in ("", [], {}):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return redact_urls(text[:_MOST_LETTERS])

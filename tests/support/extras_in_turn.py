"""Chooses the extras that are tested today: a seventh, those whose files the newest commits have
changed, and those that need an extra with a changed file.

This applies to test files in tests/extras with HVDTRAIN_TEST_ROUNDS=day. Tests of an extra in other
files run each day, and if they change, they choose nothing. Without git's commits all extras are
tested.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rotation import FILES_OF_EXTRAS, rows_of_day, today
from without_extra import ROOT, is_test_of, names_of_extras, needing

COMMITS = 20


def extras_of_day(names: Sequence[str], changed: Sequence[str] | None, day: date) -> list[str]:
    """By the files that have changed; None: which ones is unknown."""
    if changed is None:
        return list(names)
    chosen = set(rows_of_day(names, day))
    for name in names:
        if any(file.startswith(f"hvdtrain/extras/{name}/") for file in changed):
            chosen |= {name, *needing(name)}
        elif any(_is_of_extra(name, Path(file)) for file in changed):
            chosen.add(name)
    return [name for name in names if name in chosen]


def _is_of_extra(name: str, file: Path) -> bool:
    return file.match(FILES_OF_EXTRAS) and is_test_of(name, file)


def extras_of_today() -> list[str]:
    return extras_of_day(names_of_extras(), changed_files(), today())


def unknown_extras(chosen: Sequence[str]) -> list[str]:
    """The names that are not of an extra."""
    return sorted(set(chosen) - set(names_of_extras()))


def changed_files(commits: int = COMMITS) -> list[str] | None:
    """Returns the files that the newest commits changed, and uncommitted changes; None if git has
    fewer commits."""
    changed = _git("diff", "--name-only", "--relative", f"HEAD~{commits}")
    new = _git("ls-files", "--others", "--exclude-standard")
    return None if changed is None or new is None else changed + new


def _git(*command: str) -> list[str] | None:
    try:
        done = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def is_of_extras(file: Path, chosen: Sequence[str]) -> bool:
    """Whether a file of tests/extras tests one of the chosen extras, or none by its name."""
    tested = _extras_tested_by(file)
    return not tested or bool(tested & set(chosen))


@functools.cache  # it is asked for each test of the file
def _extras_tested_by(file: Path) -> frozenset[str]:
    return frozenset(name for name in names_of_extras() if is_test_of(name, file.relative_to(ROOT)))

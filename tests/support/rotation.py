"""Chooses the rows of the largest tables that run today: a seventh, so each row runs on
one day of the week.

    @pytest.mark.in_turn                    a test, a row or a file, of whose tests a seventh runs;
                                            so are those marked slow, faults or cluster,
                                            but for those of tests/extras, whose files run by turns
    @pytest.mark.in_turn(together=True)     a file whose tests have one dear fixture: on one day
    @pytest.mark.every_day                  one of those that runs each day
    for name in rows_of_today(CASES):       a table inside a test

HVDTRAIN_TEST_ROUNDS=day, which `make test` and the like set, asks for a seventh; otherwise all
rows run. HVDTRAIN_TEST_DAY=2026-11-28 chooses the day.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

import pytest

Row = TypeVar("Row")
DAYS = 7
BY_TURNS = {"in_turn", "slow", "faults", "cluster"}
FILES_OF_EXTRAS = "tests/extras/test_*.py"
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # of all days


def today() -> date:
    return date.fromisoformat(os.environ.get("HVDTRAIN_TEST_DAY") or date.today().isoformat())


def is_by_day() -> bool:
    return os.environ.get("HVDTRAIN_TEST_ROUNDS") == "day"


def rows_of_day(rows: Sequence[Row], day: date) -> list[Row]:
    """At least one, of a table that has rows."""
    days = min(DAYS, len(rows))
    return [row for place, row in enumerate(rows) if (place + day.toordinal()) % days == 0]


def rows_of_today(rows: Sequence[Row]) -> list[Row]:
    return rows_of_day(rows, today()) if is_by_day() else list(rows)


def is_by_turns(item: pytest.Item) -> bool:
    """Not in the files of extras. On the days of such a file its tests by turns would always be
    the same seventh: the others would never run."""
    if item.path.match(FILES_OF_EXTRAS):
        return False
    marks = {mark.name for mark in item.iter_markers()}
    return bool(BY_TURNS & marks) and "every_day" not in marks


def is_together(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("together") for mark in item.iter_markers("in_turn"))


def items_of_other_days(items: Sequence[pytest.Item], day: date) -> set[pytest.Item]:
    """Returns the tests by turns that do not run on a day: six sevenths of each file. Files begin
    on different days, so that files with a single such test do not all run on the same day."""
    places = Counter[str]()
    others = set[pytest.Item]()
    for item in filter(is_by_turns, items):
        name = item.path.name
        place = zlib.crc32(name.encode()) + places[name]
        places[name] += not is_together(item)
        if (place + day.toordinal()) % DAYS != 0:
            others.add(item)
    return others

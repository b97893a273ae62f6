"""The rows of a table that run by turns: each of them on one day of the week, and the extras."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from datetime import date, timedelta

import pytest
from extras_in_turn import changed_files, extras_of_day, is_of_extras
from ranks import ROOT, needs_an_extra, needs_extra, python
from rotation import (
    COLLECTED,
    DAYS,
    FILES_OF_EXTRAS,
    is_by_turns,
    is_together,
    items_of_other_days,
    rows_of_day,
)
from without_extra import names_of_extras, needing

from hvdtrain.core.extras import Extra, needed_first

FIRST = date(2026, 12, 30)
ALL_DAYS = [FIRST + timedelta(days) for days in range(DAYS)]
COLLECT = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]


@pytest.mark.in_turn
@pytest.mark.parametrize("row", range(8))
def test_a_row(row: int) -> None:
    """What the other tests of this file choose from."""
    assert row in range(8)


@pytest.mark.parametrize("count", range(20))
def test_each_row_of_a_table_is_of_one_day_of_the_week(count: int) -> None:
    days = [rows_of_day(range(count), day) for day in ALL_DAYS]
    assert set().union(*days) == set(range(count))
    assert {len(rows) for rows in days} <= {count // DAYS, -(-count // DAYS)} - {0} or count == 0
    if count >= DAYS:
        assert sum(map(len, days)) == count
    assert rows_of_day(range(count), FIRST + timedelta(12 * DAYS)) == days[0] or count < DAYS


def test_each_test_by_turns_runs_on_one_day_of_the_week(request: pytest.FixtureRequest) -> None:
    """Of all files that this run has read; `make test` reads all."""
    collected = request.config.stash[COLLECTED]
    marked = {item for item in collected if is_by_turns(item)}
    chosen = [marked - items_of_other_days(collected, day) for day in ALL_DAYS]
    assert len(marked) >= 4 and set().union(*chosen) == marked
    assert sum(map(len, chosen)) == len(marked)
    of_files = [Counter(str(item.path) for item in items) for items in chosen]
    for path in {str(item.path) for item in marked if not is_together(item)}:
        of_file = [of_day[path] for of_day in of_files]
        assert max(of_file) - min(of_file) <= 1, path


def test_each_test_of_each_file_runs_on_one_day_of_the_week_where_no_extra_has_changed(
    request: pytest.FixtureRequest,
) -> None:
    """Of all files that this run has read: of tests/extras `make test` reads those of the day."""
    collected = request.config.stash[COLLECTED]
    names = names_of_extras()
    run = set[pytest.Item]()
    for day in ALL_DAYS:
        extras = extras_of_day(names, [], day)
        others = items_of_other_days(collected, day)
        run |= {
            item
            for item in collected
            if item not in others
            and (not item.path.match(FILES_OF_EXTRAS) or is_of_extras(item.path, extras))
        }
    assert [item.nodeid for item in collected if item not in run] == []


def test_a_run_by_day_has_those_rows_and_a_run_in_full_has_all(
    request: pytest.FixtureRequest,
) -> None:
    def rows_collected(**env: str) -> set[str]:
        tests = collected(__file__, **env)
        return {row for test in tests for row in re.findall(r"::(test_a_row\[\d\])", test)}

    here = [item for item in request.config.stash[COLLECTED] if item.path == request.path]
    rows = {item.name for item in here if is_by_turns(item)}
    others = {item.name for item in items_of_other_days(here, FIRST)}
    by_day = rows_collected(HVDTRAIN_TEST_ROUNDS="day", HVDTRAIN_TEST_DAY=FIRST.isoformat())
    assert by_day == rows - others and 0 < len(by_day) < len(rows) == 8
    assert rows_collected(HVDTRAIN_TEST_ROUNDS="full") == rows


@needs_an_extra
def test_all_tests_of_the_extras_that_are_given_run_by_day() -> None:
    """Those marked faults, too, of which elsewhere a seventh runs. The variables are what the first
    lines of a run by day show."""
    words = ["-m", "faults", "tests/extras"]
    in_full = collected(*words, HVDTRAIN_TEST_ROUNDS="")
    of_extra = {
        name: {test for test in in_full if is_of_extras(ROOT / test.partition("::")[0], [name])}
        for name in names_of_extras()
    }
    given = next(name for name, tests in of_extra.items() if tests)
    by_day = collected(
        *words,
        HVDTRAIN_TEST_ROUNDS="day",
        HVDTRAIN_TEST_DAY=FIRST.isoformat(),
        HVDTRAIN_TEST_EXTRAS=given,
    )
    assert by_day == of_extra[given]


@needs_extra("drill")
def test_an_unknown_extra_is_an_error() -> None:
    env = {
        "HVDTRAIN_TEST_ROUNDS": "day",
        "HVDTRAIN_TEST_EXTRAS": "swepe drill",
        "PYTEST_XDIST_WORKER": "",  # a worker takes the choice of the process that started it
    }
    result = python([*COLLECT, __file__], env=env, is_warm=False)
    assert (result.returncode, result.stdout) == (pytest.ExitCode.USAGE_ERROR, "")
    known = ", ".join(names_of_extras())
    assert f"names swepe, which is not an extra; there are: {known}\n" in result.stderr


def collected(*words: str, **env: str) -> set[str]:
    """The tests that a run of its own chooses."""
    result = python([*COLLECT, *words], env=env, is_warm=False)
    assert result.returncode == 0, result.stdout
    return set(re.findall(r"^tests/.*::.*", result.stdout, re.MULTILINE))


def test_each_extra_is_tested_on_one_day_of_the_week_and_when_it_has_changed() -> None:
    names = names_of_extras()
    days = [extras_of_day(names, [], day) for day in ALL_DAYS]
    assert sorted(itertools.chain(*days)) == names
    for name in names:
        (extra,) = (ROOT / "hvdtrain" / "extras" / name).glob("__init__.py")
        changed = str(extra.relative_to(ROOT))
        assert all(
            {name, *needing(name)} <= {*extras_of_day(names, [changed], day)} for day in ALL_DAYS
        )
        assert all(
            name in extras_of_day(names, [f"tests/extras/test_{name}_gone.py"], day)
            for day in ALL_DAYS
        )
    unrelated = ["hvdtrain/core/numbers.py", "tests/tasks/test_maps.py", "docs/extras.md"]
    assert [extras_of_day(names, unrelated, day) for day in ALL_DAYS] == days
    assert extras_of_day(names, None, FIRST) == names and changed_files(10**9) is None


def test_an_extra_is_needed_by_others_through_others() -> None:
    needs: dict[str, tuple[str, ...]] = {"a": ("c",), "b": (), "c": ("d",), "d": ()}
    every = {name: Extra("stable", "Does it.", needs=of) for name, of in needs.items()}
    assert needed_first(every) == ["d", "c", "a", "b"]
    assert [needing(name, every) for name in every] == [[], [], ["a"], ["a", "c"]]


@needs_an_extra
def test_each_file_of_extras_is_of_one_that_is_tested() -> None:
    names = names_of_extras()
    files = sorted((ROOT / "tests" / "extras").glob("test_*.py"))
    assert files
    for file in files:
        assert any(is_of_extras(file, [name]) for name in names), file
        assert is_of_extras(file, names)
    assert not is_of_extras(ROOT / "tests" / "extras" / "test_sweep.py", ["drill"])
    assert is_of_extras(ROOT / "tests" / "extras" / "test_sweep.py", ["drill", "sweep"])

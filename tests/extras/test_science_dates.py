"""Dates of a time coordinate in their calendars, and the samples that data.split_val selects by
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.data.option_error import OptionError
from hvdtrain.extras.science.stored.dates import dates_of
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.split import SplitColumn, samples_of_split


@pytest.mark.parametrize(
    ("number", "units", "calendar", "date"),
    [  # as cftime.num2date() has them
        (31, "days since 1979-01-01", "standard", "1979-02-01T00:00:00"),
        (0.5, "days since 1979-1-1 00:00:00", "", "1979-01-01T12:00:00"),
        (6.25, "hours since 1900-01-01 06:00:00.0", "gregorian", "1900-01-01T12:15:00"),
        (-1, "seconds since 1970-01-01T00:00:00Z", "proleptic_gregorian", "1969-12-31T23:59:59"),
        (722451, "days since 1-1-1", "standard", "1979-01-01T00:00:00"),
        (722449, "days since 0001-01-01", "proleptic_gregorian", "1979-01-01T00:00:00"),
        (59, "days since 2000-01-01", "noleap", "2000-03-01T00:00:00"),
        (59, "days since 2001-01-01", "366_day", "2001-02-29T00:00:00"),
        (59, "days since 2000-01-01", "360_day", "2000-02-30T00:00:00"),
        (np.float32(15999.25), "days since 1979-01-01", "", "2022-10-21T06:00:00"),
        (3, "months since 2000-01-01", "", None),
        (3, "days since 2000-01-01", "julian", None),
        (3, "K", "", None),
    ],
)
def test_a_number_is_the_date_of_its_calendar(
    number: float, units: str, calendar: str, date: str | None
) -> None:
    found = dates_of(np.array([number]), {"units": units, "calendar": calendar})
    assert (None if found is None else found.tolist()) == (None if date is None else [date])


DAYS = dates_of(np.arange(0, 1461, 0.5), {"units": "days since 2000-01-01"})


def validates(column: SplitColumn, *listed: Any) -> list[int]:
    wanted = Wanted(None, split_by="time", split_val=listed)
    paths = [Path("f.nc")]
    val, train = (samples_of_split(column, paths, wanted, split) for split in ("val", "train"))  # type: ignore[arg-type]
    assert sorted([*val, *train]) == list(range(len(column.values)))
    found: list[int] = val.tolist()
    return found


@pytest.mark.parametrize(
    ("listed", "days"),
    [
        ([2001], range(366, 731)),
        (["2001-02"], range(397, 425)),
        (["2000-01-03:2000-01-05"], range(2, 5)),
        (["2003-12-30:"], range(1459, 1461)),
        ([":2000-01-02", "2003-12-31"], [0, 1, 1460]),
    ],
)
def test_dates_are_selected_by_their_beginning(listed: list[Any], days: Any) -> None:
    assert DAYS is not None
    found = validates(SplitColumn(DAYS, True), *listed)
    assert found == [half for day in days for half in (2 * day, 2 * day + 1)]


def test_times_of_a_day_may_end_a_range_of_dates() -> None:
    assert DAYS is not None
    assert validates(SplitColumn(DAYS, True), "2000-01-01T12:2000-01-02T00:00") == [1, 2]
    assert validates(SplitColumn(DAYS, True), "2000-01-02 12:00") == [3]


def test_what_is_not_a_date_is_an_error() -> None:
    assert DAYS is not None
    column = SplitColumn(DAYS, True)
    for wrong, message in (
        ("May 2001", "has May 2001, but data.split_by is a time coordinate"),
        (":", "is a time coordinate"),
        ("2009", "no sample is in 2009: time is 2000-01-01T00:00:00 to 2003-12-31T12:00:00"),
    ):
        with pytest.raises(OptionError, match=message):
            validates(column, wrong)
    with pytest.raises(OptionError, match="time has dates: which of them") as caught:
        samples_of_split(column, [Path("f")], Wanted(None, split_by="time"), "val")
    assert caught.value.fix == 'data.split_val=["2003"]'


def test_a_time_of_day_is_not_a_range() -> None:
    column = SplitColumn(np.array(["12:15", "12:45", "20:00"]), False)
    assert validates(column, "12:45") == [1]
    with pytest.raises(OptionError, match=r"no sample has 12:30"):
        validates(column, "12:30")
    assert validates(SplitColumn(np.arange(5), False), "1:2", 4) == [1, 2, 4]

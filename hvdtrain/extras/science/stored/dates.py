"""Dates of a time coordinate, such as days since 1979-01-01, as texts (CF 1.11, 4.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_UNITS_S = {  # word -> seconds
    **dict.fromkeys(("d", "day", "days"), 86400),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
}
_TIME = r"(?:[T ]+(\d+):(\d+)(?::(\d+)(?:\.\d*)?)?)?"
_SINCE = re.compile(
    rf"(\w+) since (\d+)-(\d+)-(\d+){_TIME}\s*(?:UTC|GMT|Z|\+?00?:?00)?", re.IGNORECASE
)
_LENGTHS = np.array([31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_MONTHS = {  # calendars whose years all have the same months
    **dict.fromkeys(("noleap", "365_day"), _LENGTHS),
    **dict.fromkeys(("all_leap", "366_day"), _LENGTHS + (np.arange(12) == 1)),
    "360_day": np.full(12, 30),
}
_MIXED = ("standard", "gregorian", "")  # Julian before 15 October 1582
_JULIAN_DAY_OF_1970 = 2440588


class Since(NamedTuple):
    """A unit of time and the moment that it is counted from."""

    unit_s: int
    year: int
    month: int
    day: int
    second: int  # of the day


def dates_of(values: np.ndarray, attributes: Mapping[str, Any]) -> np.ndarray | None:
    """Returns dates (n,) as texts like 2003-06-30T12:00:00 in UTC; None unless units and calendar
    say which dates the numbers are."""
    since = _since(str(attributes.get("units", "")))
    calendar = str(attributes.get("calendar", "")).lower()
    is_number = values.dtype.kind in "iuf" and np.isfinite(values).all()
    if since is None or not is_number:
        return None
    seconds = since.second + np.rint(values.astype(np.float64) * since.unit_s).astype(np.int64)
    if calendar in _MONTHS:
        return _of_equal_years(seconds, since, _MONTHS[calendar])
    if calendar not in (*_MIXED, "proleptic_gregorian"):
        return None
    first = _days_since_1970(since, is_mixed=calendar in _MIXED)
    return np.datetime_as_string((first * 86400 + seconds).astype("datetime64[s]"), unit="s")


def _since(units: str) -> Since | None:
    match = _SINCE.fullmatch(units.strip())
    if match is None or match[1].lower() not in _UNITS_S:
        return None
    year, month, day, hours, minutes, seconds = (int(part or 0) for part in match.groups()[1:])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    second = 3600 * hours + 60 * minutes + seconds
    return Since(_UNITS_S[match[1].lower()], year, month, day, second)


def _days_since_1970(since: Since, is_mixed: bool) -> int:
    if is_mixed and since[1:4] < (1582, 10, 15):
        # Julian day number of a date of the Julian calendar; March is the first month
        months = (since.month + 9) % 12
        years = since.year + 4800 - (since.month <= 2)
        number = since.day + (153 * months + 2) // 5 + 365 * years + years // 4 - 32083
        return number - _JULIAN_DAY_OF_1970
    first = np.datetime64(f"{since.year:04}-{since.month:02}").astype("datetime64[D]")
    return int(first.astype(int)) + since.day - 1


def _of_equal_years(seconds: np.ndarray, since: Since, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths)
    first = since.year * ends[-1] + ends[since.month - 1] - lengths[since.month - 1] + since.day - 1
    days = first + seconds // 86400
    year, of_year = np.divmod(days, ends[-1])
    month = np.searchsorted(ends, of_year, "right")
    day = of_year - (ends - lengths)[month] + 1
    second = seconds % 86400
    parts = np.stack([year, month + 1, day, second // 3600, second // 60 % 60, second % 60], 1)
    texts = ["{:04}-{:02}-{:02}T{:02}:{:02}:{:02}".format(*row) for row in parts.tolist()]
    return np.array(texts, str)

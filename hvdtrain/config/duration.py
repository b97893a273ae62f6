"""Lengths of time as people write them: 90 (seconds), 45m, 1:30:00."""

from __future__ import annotations

import re

from hvdtrain.errors import UserError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_NUMBER = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)")
_CLOCK = re.compile(r"([0-9]{1,9}):([0-5][0-9])(?::([0-5][0-9]))?")  # MM:SS, H:MM:SS
_DAYS = re.compile(r"([0-9]{1,9})-([01]?[0-9]|2[0-3])(?::([0-5][0-9]))?(?::([0-5][0-9]))?")  # D-HH, D-HH:MM, D-HH:MM:SS
_EXAMPLES = "90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"


def parse_duration(text: str, where: str) -> float:
    """Seconds, more than 0, of 90, 45m, 1:30:00 and the like. Raises UserError for anything else; `where` says where it was set."""
    duration = text.strip()
    seconds = _seconds(duration)
    if seconds is None:
        shown = repr(duration if len(duration) <= 40 else f"{duration[:37]}...")
        raise UserError(f"{shown} is not a length of time", where, f"write {_EXAMPLES}")
    if not seconds:
        raise UserError(f"{duration!r} leaves no time at all", where, f"more than 0: {_EXAMPLES}")
    return seconds


def _seconds(duration: str) -> float | None:
    if match := _NUMBER.fullmatch(duration):
        return float(match[1]) * _UNITS[match[2]]
    if match := _DAYS.fullmatch(duration):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(86400 * days + 3600 * hours + 60 * minutes + seconds)
    if match := _CLOCK.fullmatch(duration):
        first, second, third = match.groups()
        return 60.0 * int(first) + int(second) if third is None else 3600.0 * int(first) + 60 * int(second) + int(third)
    return None

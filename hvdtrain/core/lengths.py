"""Lengths as people write them: of training, 5 (epochs), "500 steps", "10%"; of time, 90 (seconds),
45m, 1:30:00."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from hvdtrain.errors import UserError

Unit = Literal["epochs", "steps", "samples", "tokens", "%"]
EXAMPLES = "5 (epochs), '500 steps', '1e6 samples', '2e8 tokens' or '10%' (of the job)"

_PATTERN = r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]{1,2})?) *(epochs?|steps?|samples?|tokens?|%)"
_MOST = {"epochs": 1e9, "steps": 1e15, "samples": 1e15, "tokens": 1e18, "%": 100.0}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)")
_CLOCK_TIME = re.compile(r"([0-9]{1,9}):([0-5][0-9])(?::([0-5][0-9]))?")  # MM:SS, H:MM:SS
# D-HH, D-HH:MM, D-HH:MM:SS
_DAYS_AND_TIME = re.compile(r"([0-9]{1,9})-([01]?[0-9]|2[0-3])(?::([0-5][0-9]))?(?::([0-5][0-9]))?")
_EXAMPLES_OF_TIME = "90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"


class Length(NamedTuple):
    amount: float
    unit: Unit

    def words(self, multiplier: int = 1) -> str:
        """Formats the length: 1.5 epochs, 500 steps, 10% of the job. multiplier: factor on epochs
        (recipe.adapt_regime)."""
        if self.unit == "%":
            return f"{self.amount:g}% of the job"
        amount = shown_amount(self.amount * (multiplier if self.unit == "epochs" else 1))
        return f"{amount} {self.unit if amount != '1' else self.unit.removesuffix('s')}"


def read_length(value: Any) -> Length:
    """Parses a length. Raises ValueError for anything else, with text for the fix of a message."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        length = Length(value, "epochs")
    elif match := re.fullmatch(_PATTERN, value.strip() if isinstance(value, str) else ""):
        unit = match[2] if match[2] == "%" else f"{match[2].removesuffix('s')}s"
        length = Length(float(match[1]), unit)  # type: ignore[arg-type]
    else:
        raise ValueError(f"give {EXAMPLES}")
    if not 0 <= length.amount <= _MOST[length.unit]:
        raise ValueError(f"give 0 to {_MOST[length.unit]:g} {length.unit}; a length is {EXAMPLES}")
    return length


def shown_amount(amount: float) -> str:
    """Formats an amount: 1,437 or 0.35."""
    return f"{amount:,.0f}" if amount == math.floor(amount) else f"{amount:g}"


def as_given(number: float) -> float:
    """Converts 3.0 to 3: a configuration shows numbers as people write them."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _checked(value: Any) -> float | str:
    length = read_length(value)
    return value.strip() if isinstance(value, str) else as_given(length.amount)


def _checked_above_0(value: Any) -> float | str:
    if not read_length(value).amount:
        raise ValueError(f"give more than 0, as {EXAMPLES}")
    return _checked(value)


_JSON = {
    "anyOf": [
        {"type": "number", "minimum": 0},
        {"type": "string", "pattern": rf"^\s*{_PATTERN}\s*$"},
    ]
}
_AS_IT_IS = PlainSerializer(lambda value: value)
LengthValue = Annotated[float | str, PlainValidator(_checked), _AS_IT_IS, WithJsonSchema(_JSON)]
PositiveLength = Annotated[
    float | str, PlainValidator(_checked_above_0), _AS_IT_IS, WithJsonSchema(_JSON)
]


def parse_duration(text: str, where: str) -> float:
    """Parses 90, 45m, 1:30:00 and the like to seconds, more than 0. Raises UserError for anything
    else. where: where it was set."""
    duration = text.strip()
    seconds = _seconds(duration)
    if seconds is None:
        shown = repr(duration if len(duration) <= 40 else f"{duration[:37]}...")
        raise UserError(f"{shown} is not a length of time", where, f"write {_EXAMPLES_OF_TIME}")
    if not seconds:
        raise UserError(
            f"{duration!r} leaves no time at all", where, f"more than 0: {_EXAMPLES_OF_TIME}"
        )
    return seconds


def _seconds(duration: str) -> float | None:
    if match := _TIME.fullmatch(duration):
        return float(match[1]) * _SECONDS[match[2]]
    if match := _DAYS_AND_TIME.fullmatch(duration):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(86400 * days + 3600 * hours + 60 * minutes + seconds)
    if match := _CLOCK_TIME.fullmatch(duration):
        first, second, third = match.groups()
        return (
            60.0 * int(first) + int(second)
            if third is None
            else 3600.0 * int(first) + 60 * int(second) + int(third)
        )
    return None
